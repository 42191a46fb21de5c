"""Parts of one call all run, on several threads, and a failure reaches the caller after every part has ended."""

import threading

import pytest

from runtime.ops import parallel
from runtime.ops.parallel import Crew, cpu_count, ranges


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [
        (4, 1, [(0, 4)]), (4, 2, [(0, 2), (2, 4)]), (5, 2, [(0, 2), (2, 5)]), (7, 3, [(0, 2), (2, 4), (4, 7)]),
        (2, 8, [(0, 1), (1, 2)]), (1, 2, [(0, 1)]), (5, 0, [(0, 5)]),
    ],
)  # fmt: skip
def test_ranges_are_consecutive_and_not_empty(count, parts, expected):
    assert ranges(count, parts) == expected


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_every_part_runs_once_however_few_threads_there_are(threads, parts):
    ran = []

    Crew(threads).run([lambda i=i: ran.append(i) for i in range(parts)])

    assert sorted(ran) == list(range(parts))


def test_parts_run_at_the_same_time():
    meet = threading.Barrier(2, timeout=20)

    Crew(2).run([meet.wait, meet.wait])

    assert not meet.broken


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failure_is_raised_after_the_other_parts_have_ended(failing):
    ran, crew = [], Crew(2)

    def part(i):
        if i == failing:
            raise ValueError(f"part {i}")
        ran.append(i)

    with pytest.raises(ValueError, match=f"part {failing}"):
        crew.run([lambda i=i: part(i) for i in range(3)])

    assert sorted(ran) == [i for i in range(3) if i != failing]
    crew.run([lambda: ran.append(7), lambda: ran.append(8)])
    assert sorted(ran)[-2:] == [7, 8]


def test_calls_from_two_threads_do_not_mix_their_parts():
    crew, results = Crew(2), {}

    def caller(name):
        for _ in range(50):
            mine = []
            crew.run([lambda mine=mine: mine.append(name) for _ in range(4)])
            results.setdefault(name, []).append(mine)

    callers = [threading.Thread(target=caller, args=(name,)) for name in "ab"]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()

    assert results == {"a": [["a"] * 4] * 50, "b": [["b"] * 4] * 50}


def test_process_has_one_crew_as_large_as_its_processors(monkeypatch):
    monkeypatch.setattr(parallel, "_crew", None)

    assert parallel.crew() is parallel.crew()
    assert parallel.crew().threads == cpu_count()


@pytest.mark.parametrize(("processors", "expected"), [(1, 1), (3, 3), (64, 8)])
def test_threads_follow_the_processors_that_this_process_may_use(processors, expected, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(processors)))

    assert cpu_count() == expected
