"""With `-n`, each file of tests is one worker's: what its tests share is compiled or trained once, not in every worker.

Files are handed out in the order in which they are collected. xdist would begin with those that have most tests, and
end with one that takes minutes; here the last ones are short, so that the workers end together.
`--dist` on the command line takes the place of this.
"""

import pytest


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    if config.getoption("dist") != "load":  # the one that `-n` means
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
