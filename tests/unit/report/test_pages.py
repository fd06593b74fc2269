"""What holds for every page: it loads nothing, its policy allows its one script, its style sheet has its classes."""

import base64
import functools
import hashlib
import re

import pytest
from test_plan_page import NO_ROOM, Reader, forecast_of, outlook_of
from test_run_page import text_of_two

from jdp.report.pages import plan_page


@functools.cache
def plan():
    return plan_page(forecast_of(outlook_of(), outlook_of("ddp", headroom=NO_ROOM)), title="t")


@pytest.fixture(params=[plan, text_of_two], ids=["plan", "runs"])
def text(request):
    return request.param()


def test_it_loads_nothing_from_outside(text):
    found = Reader(text)
    references = found.values("src", "href", "xlink:href", "srcset", "action", "data")
    assert references and all(reference.startswith("#") for reference in references)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(found.tags)
    assert re.findall(r"url\((?!#)|@import", text) == []
    assert "default-src 'none'" in found.values("content")[0]
    # Namespaces are names, and nothing is fetched from them.
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_pictures_have_no_ids_of_the_same_name(text):
    ids = Reader(text).values("id")
    assert len(set(ids)) == len(ids)


def test_one_script_whose_digest_the_policy_names(text):
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_every_class_has_a_style(text):
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    used = {name for value in Reader(text).values("class") for name in value.split()}
    assert [name for name in sorted(used) if f".{name}" not in style] == []
