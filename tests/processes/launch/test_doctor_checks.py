"""`jdp doctor` finds real faults: each is made here, as far as this machine allows, and found in words that mend it."""

import pytest
from damage import small_disk

from jdp.launch.doctor import Examined, Finding, examine_disk, examine_versions, existing


def named(findings, check):
    (found,) = (finding for finding in findings if finding.check == check)
    return found


def test_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", "2m"):
        (tmp_path / "disk" / "large").write_bytes(bytes(2**21))
        findings = examine_disk(tmp_path / "disk" / "new" / "runs")
    assert named(findings, "disk").status == "wrong" and named(findings, "disk").found.startswith("0 B free of 2 MiB")
    assert named(findings, "writing").status == "wrong"
    assert named(findings, "writing").found.endswith("cannot be written: No space left on device")


def test_a_disk_without_inodes(tmp_path):
    with small_disk(tmp_path / "disk", "100m", inodes=3) as remount:
        for number in range(2):
            (tmp_path / "disk" / f"{number}").touch()
        findings = examine_disk(tmp_path / "disk")
        remount("ro")
        assert named(examine_disk(tmp_path / "disk"), "writing").found.endswith("Read-only file system")
    assert named(findings, "inodes").found.startswith("0 free of 3") and named(findings, "inodes").status == "wrong"
    assert named(findings, "writing").status == "wrong"


def test_looking_at_a_disk_leaves_nothing(tmp_path):
    assert named(examine_disk(tmp_path / "runs"), "writing").status == "ok"
    assert list(tmp_path.iterdir()) == []
    assert existing(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "runs").write_text("a file")
    assert named(examine_disk(tmp_path / "runs"), "writing").mend == "choose another --run-dir"


def installed(folder, name, version, requires=""):
    """What pip leaves of a package, found before those that are installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    (info / "METADATA").write_text(lines)


@pytest.mark.parametrize(
    ("name", "version", "found", "mend"),
    [
        ("jax", "0.9.1", "jdp was tested with jax<0.13,>=0.10; installed is 0.9.1", "pip install 'jax<0.13,>=0.10'"),
        ("optax", "9.0", "jdp was tested with optax", "pip install 'optax"),
        ("jax-cuda13-plugin", "0.9.9", "jax-cuda13-plugin is 0.9.9, and jaxlib", "pip install 'jax[cuda13]=="),
    ],
)
def test_versions_that_do_not_match(name, version, found, mend, tmp_path, monkeypatch):
    installed(tmp_path, "jdp", "1", "Requires-Dist: jax<0.13,>=0.10\nRequires-Dist: optax>=0.2.8,<0.3\n")
    assert [each.status for each in examine_versions()] == ["ok"]
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, name, version)
    (finding,) = examine_versions()
    assert finding.status == "wrong" and finding.found.startswith(found) and finding.mend.startswith(mend)


# What is printed.


def test_each_problem_is_reported_once_with_processes():
    fine, bad, note = Finding("a", "ok", "1"), Finding("a", "wrong", "2", "mend it"), Finding("b", "note", "3", "look")
    other = Finding("a", "wrong", "4", "mend it")
    examined = Examined({0: [fine, note], 1: [bad], 2: [other]}, {0: "n0", 1: "n1", 2: "n1"})
    wrong, noted = "WRONG  a  2  [processes 1 and 2]", "note   b  3  [process 0 on n0]"
    assert examined.lines() == [wrong, "          → mend it", noted, "          → look"]
    assert examined.wrong == 1
    well = Examined({0: [fine], 1: [Finding("a", "ok", "9")]}, {0: "n0", 1: "n1"})
    assert well.lines() == ["ok     a  1"] and well.wrong == 0
