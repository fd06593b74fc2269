"""The steps of `experiments/ci/verify.yml`, run as GitHub's runner does, on a pull request in a real repository."""

import os
import subprocess

import pytest
import yaml
from paths import EXPERIMENTS

CI = EXPERIMENTS / "ci"
WORKFLOW = yaml.safe_load((CI / "verify.yml").read_text())
MEAN = ("        for layer in params:\n", "        for layer in params:\n            x = x - x.mean(0)\n")
COMMENT = ("def make_step", "# Moves every line below.\n\n\ndef make_step")


def git(folder, *arguments):
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def pull_request(folder, change, *, on_main=True):
    """Make a checkout of a pull request that changes the program, whose other branch is origin/main."""
    upstream, checkout = folder / "upstream", folder / "checkout"
    program = upstream / "experiments" / "ci" / "train.py"
    program.parent.mkdir(parents=True)
    (upstream / "README.md").write_text("A repository that knows nothing of jdp.\n")
    if on_main:
        program.write_text((CI / "train.py").read_text())
    git(upstream, "init")
    for arguments in (("add", "."), ("commit", "-m", "Begin"), ("branch", "-M", "main")):
        git(upstream, *arguments)
    git(folder, "clone", str(upstream), str(checkout))
    own = checkout / "experiments" / "ci" / "train.py"
    own.parent.mkdir(parents=True, exist_ok=True)
    before = (CI / "train.py").read_text()
    assert change[0] in before
    own.write_text(before.replace(*change))
    git(checkout, "commit", "-a", "-m", "Change", "--allow-empty")
    return checkout


def run_steps(checkout, *, target=None):
    """Run each command of the workflow but the installation; return (exit code of the last, the summary)."""
    [job] = WORKFLOW["jobs"].values()
    temporary = checkout.parent / "temporary"
    temporary.mkdir()
    summary = temporary / "summary.md"
    given = {**os.environ, **WORKFLOW["env"], "GITHUB_BASE_REF": "main", "RUNNER_TEMP": str(temporary)}
    given["GITHUB_STEP_SUMMARY"] = str(summary)
    root = str(CI.parents[1])
    steps = [step for step in job["steps"] if "run" in step and step["name"] != "Install"]
    assert len(steps) == 2
    for step in steps:
        command = step["run"].replace("PYTHONPATH=$PWD", f"PYTHONPATH=$PWD:{root}")  # jdp is not of this checkout
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
        environment = given | ({"TARGET": target} if target else {})
        done = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode and not step.get("continue-on-error"):
            break
    return done.returncode, summary.read_text() if summary.exists() else done.stderr


@pytest.mark.rest
def test_a_pull_request_sending_more_fails(tmp_path):
    code, summary = run_steps(pull_request(tmp_path, MEAN), target="cpu:4")
    assert code == 1, summary
    first, _, table = summary.partition("\n")
    assert "`experiments/ci/train.py:make_step` for `cpu:4`: WORSE than base.json by more than 2 %: " in first
    assert "| all-reduce | `experiments/ci/train.py:31` | – |" in table
    assert str(tmp_path) not in table.partition("</details>")[0]  # lines are named from the repository
    assert "- Activations: " in table


@pytest.mark.rest
@pytest.mark.aot
def test_for_described_gpus_moved_lines_are_equal(tmp_path):
    code, summary = run_steps(pull_request(tmp_path, COMMENT))
    assert code == 0, summary
    assert "for `h100:8x8`: Equal to " in summary
    assert summary.partition("<details>")[0].count("|") == 0


@pytest.mark.rest
def test_the_first_pull_request_has_no_baseline(tmp_path):
    code, summary = run_steps(pull_request(tmp_path, COMMENT, on_main=False), target="cpu:4")
    assert code == 0, summary
    assert "on data=4 for `cpu:4`" in summary
    assert "before" not in summary


def test_the_workflow_is_one_of_githubs():
    """Only actions of GitHub's, on its free runner, with no more permission than reading."""
    [job] = WORKFLOW["jobs"].values()
    assert WORKFLOW[True] == "pull_request"  # YAML 1.1 reads `on` as true
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert job["runs-on"] == "ubuntu-latest"
    assert all(step["uses"].startswith("actions/") for step in job["steps"] if "uses" in step)
    assert {"run", "uses"} >= {key for step in job["steps"] for key in step} - {"name", "with", "continue-on-error"}
