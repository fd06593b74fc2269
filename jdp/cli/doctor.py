"""`jdp doctor`: checks this machine, or all processes together, and names the fix for each fault."""

import contextlib
import json as as_json
import math
import os
import shlex
import socket
import sys
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import tyro

from jdp.base.machine import choose_platform
from jdp.base.user_path import user_path
from jdp.cli.options import UsageError, parse, stdout_to_stderr

if TYPE_CHECKING:
    from jdp.launch.doctor import Finding

_BEFORE_OTHERS = 5.0  # seconds by which process 0 reports a timeout before the others end
_REPORTING, _VERIFYING = 60.0, 86400.0  # how long the others wait for process 0, which may read terabytes


@dataclass(frozen=True)
class Options:
    """Examines this machine, or all processes together, and reports each fault with the command that fixes it.

    It checks versions, devices and the disk of the runs, and all-reduces over all devices for two seconds. With several
    processes it also checks that all of them join and have the same versions. Start it like the training: jdp launch -n
    2 -- -m jdp doctor, srun jdp doctor, mpirun jdp doctor.

    With RUN it also compares the run's checkpoints with their checksums. It exits with 0 if nothing is wrong, else 1.
    """

    run: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[RUN]")] = None
    """Run whose checkpoints to verify: its folder, or its name in --run-dir."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder of the runs, whose disk is checked; it need not exist."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 25.0
    """Seconds to wait for the other processes, and for an all-reduce that hangs. JAX itself ends a process half a
    minute after a peer has died."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "doctor", arguments)
    folder = _check(options)
    report = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    with report as stdout, stdout_to_stderr() if options.json else contextlib.nullcontext():
        return _Examination(options, folder, stdout).examine()


def _check(options: Options) -> Path | None:
    """Return the folder of RUN; None if none is given."""
    if not 0 < options.timeout <= 86400:
        raise UsageError(f"--timeout takes seconds, above 0 and at most a day; given {options.timeout}: write 25")
    if options.run is None:
        return None
    path, place = user_path(options.run), options.run_dir
    folder = next((each for each in (path, place / path) if each.is_dir()), None)
    if folder is None:
        raise UsageError(f"there is no run {options.run}, neither as a folder nor in {place}: name its folder")
    return folder


@dataclass
class _Examination:
    """The findings so far, which are printed even if a later check hangs."""

    options: Options
    run_folder: Path | None  # of the run whose checkpoints are verified
    stdout: TextIO  # the stream of the report
    me: int = 0  # index of this process
    count: int = 1  # of all processes
    findings: "list[Finding]" = field(default_factory=list)  # of this process, not yet in `gathered`
    gathered: "dict[int, list[Finding]]" = field(default_factory=dict)  # of every process, after the exchange
    hosts: dict[int, str] = field(default_factory=dict)  # of every process

    def examine(self) -> int:
        from jdp.core.cluster.barrier import from_first_process
        from jdp.launch.doctor import Finding, examine_disk, examine_versions

        self.findings += [*examine_versions(), *examine_disk(self.run_folder or self.options.run_dir)]
        choose_platform()
        try:
            if not self._join() or not self._examine_together():
                return self._report()
        except Exception as error:
            from jdp.core.cluster.initialize import is_lost_peer

            if not is_lost_peer(error):
                raise
            self.findings.append(Finding("processes", "wrong", str(error), "see the last output of that process"))
            return self._report()
        if self.run_folder is not None and self.me == 0:
            self.findings += _verified(self.run_folder)
        seconds = _VERIFYING if self.run_folder else _REPORTING
        return from_first_process("whether all is well", self._report(), seconds=seconds)

    def _join(self) -> bool:
        """Join the cluster if there is one; return False, with a finding, if that fails."""
        from jdp.core.cluster.initialize import initialize, joined_as
        from jdp.core.cluster.schedulers import find_cluster
        from jdp.launch.doctor import Finding

        try:
            if cluster := find_cluster():
                self.me, self.count = cluster.process_id or 0, cluster.num_processes or 1
            initialize(timeout_seconds=math.ceil(self.options.timeout))
        except (RuntimeError, ValueError) as error:
            self.findings.append(Finding("cluster", "wrong", str(error)))
            return False
        self.me, self.count = joined_as() or (0, 1)  # only JAX knows it in a TPU pod
        return True

    def _examine_together(self) -> bool:
        """Check the devices and an all-reduce over all of them; return False if JAX has no devices."""
        from jdp.launch.doctor import examine_all_reduce, examine_devices, gather

        seconds = 0.8 * self.options.timeout  # these waits name the missing process, so they end before `_bounded`
        with self._bounded("devices"):
            self.findings += examine_devices()
        if self.findings[-1].check == "devices":
            return False
        with self._bounded("processes"):
            self.gathered, self.hosts = gather(self.findings, seconds)
        self.findings = []
        with self._bounded("all-reduce"):
            self.findings = examine_all_reduce()
            last, _ = gather(self.findings, seconds)
        self.findings, self.gathered = [], {each: [*self.gathered[each], *last[each]] for each in self.gathered}
        return True

    @contextlib.contextmanager
    def _bounded(self, what: str) -> Generator[None]:
        """Report, and end this process, if the code in `with` does not end in time; it may hang in C++."""
        from jdp.launch.doctor import Finding

        seconds = self.options.timeout + (_BEFORE_OTHERS if self.me else 0)  # process 0 reports first

        def give_up() -> None:
            found = f"not done after {self.options.timeout:g} seconds: a process, a device or a link hangs"
            mend = (
                "check fewer hosts at a time to find it; jdp doctor --timeout 120 if starting takes longer; on GPUs "
                "try NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1, one at a time, and NCCL_DEBUG=INFO"
            )
            self.findings.append(Finding(what, "wrong", found, mend))
            self._report()
            os._exit(1)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report(self) -> int:
        """Print the findings of all processes that sent them, and return the exit code."""
        from jdp.guard.diagnosis import ERRORS
        from jdp.launch.doctor import Examined, described

        if self.me:  # process 0 reports the findings that the others could send
            unwell = [each for each in self.findings if each.status == "wrong"]
            for each in unwell:
                print(f"process {self.me} of {self.count}: {each.check}: {each.found} → {each.mend}", file=sys.stderr)
            return int(bool(unwell))
        found = {**self.gathered, self.me: [*self.gathered.get(self.me, []), *self.findings]}
        examined = Examined(found, self.hosts or {self.me: socket.gethostname()})
        if self.options.json:
            lines = [as_json.dumps(examined.to_json(), allow_nan=False)]
        else:
            alone = self.count > 1 and not self.gathered
            who = f"process 0 of {self.count}, alone" if alone else described(examined.hosts)
            things = "1 thing is" if examined.wrong == 1 else f"{examined.wrong} things are"
            verdict = [ERRORS, f"{things} wrong."] if examined.wrong else ["Nothing is wrong."]
            lines = [f"jdp doctor: {who}", *examined.lines(), *verdict]
        print(*lines, sep="\n", file=self.stdout, flush=True)
        return int(bool(examined.wrong))


def _verified(folder: Path) -> "list[Finding]":
    from jdp.checkpoint import check
    from jdp.launch.doctor import Finding, examine_room

    checkpoints, findings = check(folder), list[Finding]()
    for each in checkpoints:
        place, wrong = shlex.quote(str(each.folder)), each.status == "damaged"
        mend = f"jdp train resumes from the newest complete checkpoint and moves this one away; or: rm -r {place}"
        found = each.problem if wrong else "every file is as it was saved"
        findings.append(Finding.judged(f"checkpoint {each.folder.name}", found, mend, wrong=wrong))
    if not checkpoints:
        return [Finding("checkpoints", "note", f"there are none in {folder}")]
    return [*findings, examine_room(folder, checkpoints[-1].folder)]
