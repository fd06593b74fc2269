"""The notebook of first steps runs from top to bottom in a real kernel, and shows what its text says."""

import ast

import nbclient
import nbformat
import pytest
from load import LESSONS

WORDS = ["ddp", "zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def notebook():
    """The notebook as it is kept."""
    return nbformat.read(LESSONS / "first_steps.ipynb", as_version=4)


def test_it_is_short_and_keeps_no_output(notebook):
    assert len(notebook.cells) <= 15
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.rest
def test_it_shows_what_its_text_says(notebook):
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert all(line.startswith("jdp: ") for line in printed.splitlines()), printed
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    devices, losses, placements, kept, sent, report, plan = (data["text/plain"] for data in shown)
    assert devices.count("CpuDevice") == 8
    losses, kept, sent = map(ast.literal_eval, (losses, kept, sent))
    assert list(losses) == list(kept) == list(sent) == WORDS
    assert len(set(losses.values())) == 1, losses
    assert kept == dict.fromkeys(WORDS, "1,187 KiB on a device") | {"ddp": "9,477 KiB on a device"}  # nearly an eighth
    assert sent == dict.fromkeys(WORDS, "5,528 KiB a step") | {"zero3": "7,992 KiB a step"}
    assert "params/middle/kernel" in placements and "Not judged, as XLA:CPU sends" in report
    assert plan.startswith("<PlanReport of 4 candidates for cpu:8, 8 devices: Take ")
    [table] = [data["text/html"] for data in shown if "text/html" in data]
    assert "sharded on dimension 1: 256 over data=8" in table
