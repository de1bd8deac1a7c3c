"""Made-up runs and their report, for all tests of the page."""

import pytest

from gshard.mt.report import write_report
from tests.mt.report import made_up_runs
from tests.mt.report.page_reader import Page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return made_up_runs.make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def path(runs):
    return write_report(runs, runs[0].parent / "report.html")[0]


@pytest.fixture(scope="module")
def page(path):
    return Page(path)
