"""Compiled programs on disk: found again, within a limit, the user's alone, and never a reason to fail."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jdp
from jdp.core.compiling import persistent_cache

NAMES = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", *persistent_cache.SETTINGS)


@pytest.fixture
def found(monkeypatch, fresh_notices):
    """Compile a program that is not in memory any more; True if it was found on disk."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.setitem(persistent_cache.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    events: list[str] = []
    listen = lambda event, **_: events.append(event)  # noqa: E731

    def compile_it():
        jax.clear_caches()
        del events[:]
        assert jax.jit(lambda x: jnp.sin(x) * 3)(jnp.float32(0)) == 0
        return "/jax/compilation_cache/cache_hits" in events and "/jax/compilation_cache/cache_misses" not in events

    jax.monitoring.register_event_listener(listen)
    yield compile_it
    jax.monitoring.unregister_event_listener(listen)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_are_kept_by_processor(tmp_path, found):
    folder = jdp.keep_programs(tmp_path / "programs", limit_bytes=10**6)
    assert folder is not None and folder.parent == tmp_path / "programs" and len(folder.name) == 16
    assert folder.stat().st_mode & 0o777 == 0o700
    assert persistent_cache.kept_in() == folder
    assert jax.config.jax_compilation_cache_max_size == 10**6  # pyright: ignore[reportAttributeAccessIssue]
    assert not found() and found()
    with persistent_cache.without_kept_programs():
        assert not found()
    assert found()


def test_an_impossible_folder_breaks_nothing(tmp_path, found, capsys):
    (tmp_path / "file").touch()
    assert jdp.keep_programs(tmp_path / "file" / "programs") is None
    assert not found() and not found()
    assert capsys.readouterr().err.count("compiled programs are not kept for the next start: ") == 1


def test_writable_folders_of_others_are_not_used(tmp_path, found, capsys):
    """A program is code that this process runs."""
    (folder := tmp_path / "programs").mkdir()
    folder.chmod(0o770)
    assert jdp.keep_programs(folder) is None and not found()
    assert f"put code among them: its group may write to {folder}: chmod go-w {folder}\n" in capsys.readouterr().err


def test_what_jax_was_told_before_stays(tmp_path, found):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert jdp.keep_programs() == jdp.keep_programs(tmp_path / "other") == tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert jdp.keep_programs(tmp_path / "other") is None
    jax.config.update("jax_enable_compilation_cache", True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("chosen", "words", "expected"),
    [
        (False, ["a x ", "b x "], "on several hosts: set JDP_CACHE_DIR"),
        (False, ["a x ", "a x "], ""),
        (True, ["a x ", "b y "], "processors of this run's hosts differ"),
        (True, ["a x ", "b x no mark"], "not all processes of this run reach"),
    ],
)
def test_several_processes_share_one_folder(chosen, words, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(persistent_cache, "joined_as", lambda: (0, 2))
    monkeypatch.setattr(persistent_cache, "meet", lambda *_: None)
    monkeypatch.setattr(persistent_cache, "from_first_process", lambda _, own: own)
    monkeypatch.setattr(persistent_cache, "from_every_process", lambda *_: words)
    why = persistent_cache._why_not_together(tmp_path, "", chosen, "x")  # pyright: ignore[reportPrivateUsage]
    assert expected in why and bool(expected) == bool(why)
