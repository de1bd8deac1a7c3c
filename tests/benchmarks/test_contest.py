"""The contest's files, and its command on small and large problems."""

import gzip
import json
import logging
import time

import numpy as np
import pytest

from benchmarks import contest
from benchmarks.contest import from_contest
from gshard.autosharding.solver import solve
from tests.autosharding.solver.shapes import SHAPES, instance


def _contest(limit: int) -> dict:
    return {
        "name": "small",
        "nodes": {
            "costs": [[1, 5], [0, 0]],
            "usages": [[10, 2], [3, 4]],
            "intervals": [[0, 2], [1, 3]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[0, 10**18, 2, 0]]},
        "usage_limit": limit,
    }


def test_contest_files(tmp_path, capsys):
    path = tmp_path / "small.json.gz"
    for limit, cost in ((13, 1), (12, 5), (5, 7)):
        path.write_bytes(gzip.compress(json.dumps({"problem": _contest(limit)}).encode()))
        contest.main([str(path), "--seconds", "20"])
        line = json.loads(capsys.readouterr().out)
        assert (line["cost"], line["bound"], line["feasible"]) == (cost, cost, True)
    path.write_bytes(gzip.compress(json.dumps({"problem": _contest(4)}).encode()))
    with pytest.raises(SystemExit, match=r"small\.json\.gz"):
        contest.main([str(path)])


def test_costs_of_parallel_edges_and_loops_add_up():
    data = _contest(100)
    data["edges"] = {
        "nodes": [[0, 1], [1, 0], [0, 0]],
        "costs": [[1, 2, 3, 4], [10, 20, 30, 40], [100, 0, 0, 200]],
    }
    problem = from_contest(data)
    np.testing.assert_array_equal(problem.costs[0], [101, 205])
    np.testing.assert_array_equal(problem.edges[0].costs, [[11, 32], [23, 44]])


def test_progress_is_in_terms_of_the_problem_given(caplog):
    """The presolved problem has the same costs."""
    problem = from_contest(_contest(12))
    with caplog.at_level(logging.DEBUG, "gshard.auto"):
        result = solve(problem)
    seen = [record.args for record in caplog.records]
    assert seen
    assert seen[-1] == (result.cost, result.bound)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("nodes", "strategies", "tightness"), [(60, 40, 1.1), (1500, 12, 1.02)])
def test_large_instances_are_within_limits(
    tmp_path, capsys, monkeypatch, shape, nodes, strategies, tightness
):
    monkeypatch.setattr(time, "monotonic", time.process_time)  # load does not shorten the limit
    path = tmp_path / "large.json.gz"
    data = instance(shape, nodes, strategies, tightness, 3)
    path.write_bytes(gzip.compress(json.dumps({"problem": data}).encode()))
    contest.main([str(path), "--seconds", "15"])
    line = json.loads(capsys.readouterr().out)
    assert line["feasible"]
    assert line["bound"] <= line["cost"]
    assert line["cpu_seconds"] < 20
