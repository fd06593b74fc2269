"""A cache keeps what was used last, within its limit, and deletes nothing else."""

import hashlib
import os
from pathlib import Path

from jdp.base.disk_cache import Cache, default_folder, others_may_write

NAMES = [f"{hashlib.sha256(bytes([i])).hexdigest()}.json.z" for i in range(5)]


def test_the_cache_keeps_the_newest_within_its_limit(tmp_path):
    """Newest by their last use."""
    cache = Cache(tmp_path, limit_bytes=300)
    for i, name in enumerate(NAMES[:4]):
        cache.store(name, lambda file: file.write(os.urandom(100)))
        os.utime(tmp_path / name, (i, i))
    cache.load(NAMES[1], lambda file: file.read())
    cache.store(NAMES[4], lambda file: file.write(os.urandom(100)))
    assert [i for i, name in enumerate(NAMES) if cache.load(name, lambda file: file.read())] == [1, 3, 4]
    assert len(list(tmp_path.iterdir())) == 3  # no temporary file is left


def test_a_users_own_files_are_not_deleted(tmp_path):
    own = ["thesis.json.z", "0" * 64 + ".json", "1" * 64 + ".npz"]
    for name in own:
        (tmp_path / name).write_bytes(bytes(1000))
    Cache(tmp_path, limit_bytes=10).store(NAMES[0], lambda file: file.write(bytes(100)))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(own)  # the entry itself exceeds the limit


def test_a_failed_write_is_reported(tmp_path, notices):
    def fill_the_disk(file):
        file.write(bytes(100))
        raise OSError(28, "No space left on device")

    Cache(tmp_path).store(NAMES[0], fill_the_disk)
    assert list(tmp_path.iterdir()) == []
    assert f"compiled results are not kept for the next run: {tmp_path} cannot be written (No space l" in notices.text


def test_an_entry_deleted_meanwhile_is_no_fault(tmp_path, notices, monkeypatch):
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: [*listed(folder), folder / NAMES[1]])
    cache = Cache(tmp_path, limit_bytes=150)
    cache.store(NAMES[0], lambda file: file.write(bytes(100)))
    assert cache.load(NAMES[0], lambda file: file.read()) == bytes(100) and not notices.text


def test_a_missing_home_folder_is_reported_once(tmp_path, notices, fresh_notices, homeless, monkeypatch):
    """As in a container that runs as a user without an entry in passwd."""
    cache = Cache.usual()
    for name in NAMES:
        cache.store(name, lambda file: file.write(bytes(100)))
        assert cache.load(name, lambda file: file.read()) is None
    assert len(notices.records) == 1
    assert f"HOME is not set, and user {os.getuid()} has no home folder; set JDP_CACHE_DIR" in notices.text
    monkeypatch.setenv("JDP_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path


def test_the_cache_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("JDP_CACHE_DIR", str(tmp_path / "home" / "cache"))
    Cache(tmp_path / "home" / "cache" / "things").store(NAMES[0], lambda file: file.write(b"x"))
    assert (tmp_path / "home" / "cache").stat().st_mode & 0o777 == 0o700
    Cache(tmp_path / "home" / "cache" / "others").store(NAMES[0], lambda file: file.write(b"x"))


def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    assert others_may_write(tmp_path) is None
    if os.geteuid():
        return
    os.chown(tmp_path, 4242, -1)
    assert others_may_write(tmp_path) is None
    monkeypatch.setattr(os, "geteuid", lambda: 4243)
    assert others_may_write(tmp_path) == f"{tmp_path} is user 4242's: set JDP_CACHE_DIR to a folder of your own"
