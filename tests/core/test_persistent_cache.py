"""Compiled programs on disk: found again, never run when damaged, and never a reason to fail."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

import jdp
from jdp.base import notices
from jdp.core.compiling import persistent_cache

Compile = Callable[[], bool]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compile]:
    """Compile a program that is not in memory any more; True if it was found on disk."""
    monkeypatch.setitem(persistent_cache.SETTINGS, "jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    events: list[str] = []

    def listen(event: str, **_: object) -> None:
        events.append(event)

    def compile_it() -> bool:
        jax.clear_caches()
        del events[:]
        assert jax.jit(lambda x: jnp.sin(x) * 3)(jnp.float32(0)) == 0
        return "/jax/compilation_cache/cache_hits" in events and "/jax/compilation_cache/cache_misses" not in events

    jax.monitoring.register_event_listener(listen)
    yield compile_it
    jax.monitoring.unregister_event_listener(listen)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.xla"))


def test_a_program_is_found_again_and_a_damaged_one_is_made_anew(tmp_path: Path, found: Compile):
    folder = jdp.keep_programs(tmp_path / "programs")
    assert folder is not None and folder == tmp_path / "programs"
    assert not found() and found()
    for change in (
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content[:40],
        lambda _: b"",
    ):
        for entry in entries(folder):
            entry.write_bytes(change(entry.read_bytes()))
        assert not found() and found()


def test_the_least_recently_used_programs_go_first(tmp_path: Path, found: Compile):
    folder = jdp.keep_programs(tmp_path, limit_bytes=1)
    assert not found() and not found()
    assert folder is not None and not entries(folder)


def test_a_folder_that_cannot_be_written_is_said_once_and_breaks_nothing(
    tmp_path: Path, found: Compile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notices, "_said", set())
    (tmp_path / "file").touch()
    assert jdp.keep_programs(tmp_path / "file" / "programs") is None
    assert not found() and not found()
    assert capsys.readouterr().err.count("compiled programs are not kept for the next run: ") == 1


def test_without_a_home_folder_programs_are_compiled_each_time(
    found: Compile, capsys: pytest.CaptureFixture[str], homeless: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notices, "_said", set())
    assert jdp.keep_programs() is None
    assert not found() and not found()
    assert capsys.readouterr().err.startswith("jdp: nothing is kept for the next run: HOME is not set")


@pytest.mark.parametrize(("mode", "who"), [(0o770, "its group"), (0o1777, "all users")])
def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, found: Compile, capsys: pytest.CaptureFixture[str], mode: int, who: str
):
    """A program is code that this process runs."""
    folder = tmp_path / "programs"
    assert jdp.keep_programs(folder) and not found()
    assert folder.stat().st_mode & 0o777 == 0o700
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    folder.chmod(mode)
    assert jdp.keep_programs(folder) is None and not found()
    assert f"put code among them: {who} may write to {folder}: chmod go-w {folder}\n" in capsys.readouterr().err


def test_what_jax_was_told_before_stays(
    tmp_path: Path, found: Compile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notices, "_said", set())
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert jdp.keep_programs() == jdp.keep_programs(tmp_path / "own") == tmp_path / "own"
    assert not capsys.readouterr().err
    assert jdp.keep_programs(tmp_path / "other") == tmp_path / "own"
    assert (
        f"kept in {tmp_path / 'own'}, as JAX was told before, and not in {tmp_path / 'other'}"
        in capsys.readouterr().err
    )
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    assert jdp.keep_programs(tmp_path / "other") is None
    jax.config.update("jax_enable_compilation_cache", True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"folder": 3}, "text or a pathlib.Path, given '3'"),
        ({"limit_bytes": 0}, "at least 1; given 0"),
        ({"limit_bytes": "1G"}, "at least 1; given '1G'"),
    ],
)
def test_what_it_cannot_be_told(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        jdp.keep_programs(**given)
