"""The scheduler's queue: fairness between clients, deadlines, forks and windows."""

from __future__ import annotations

from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig


def make(max_running: int = 1, page_tokens: int = 4, n_pages: int = 64, window: int | None = None) -> Scheduler:
    return Scheduler(SchedulerConfig(32, max_running, page_tokens, n_pages, 64, window))


def request(name: str, n_prompt: int = 8, max_tokens: int = 4, first: int = 100, **other: object) -> Request:
    prompt = list(range(first, first + n_prompt))
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), **other)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler) -> tuple[ScheduledStep, list[Request]]:
    step = scheduler.schedule()
    return step, scheduler.update(step, [5 if step.samples(i) else None for i in range(len(step.requests))])


def order_of_finishing(scheduler: Scheduler) -> list[str]:
    names: list[str] = []
    while scheduler.has_work:
        names += [r.id for r in run_step(scheduler)[1]]
    return names


def test_a_client_with_many_requests_does_not_hold_up_another() -> None:
    s = make()
    for i in range(4):
        s.add(request(f"a{i}", first=100 * i, client="a"))
    run_step(s)
    s.add(request("b0", first=1000, client="b"))
    s.add(request("b1", first=2000, client="b"))
    assert order_of_finishing(s) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_client_that_was_given_much_waits_for_one_that_was_given_little() -> None:
    s = make()
    s.add(request("long", max_tokens=40, client="a"))
    run_step(s)
    for i in range(3):
        s.add(request(f"a{i}", first=100 + 100 * i, client="a"))
        s.add(request(f"b{i}", first=1000 + 100 * i, client="b"))
    # "long" costs 8 + 2·39 = 86, a request of b 8 + 2·3 = 14: b's three come first.
    assert order_of_finishing(s) == ["long", "b0", "b1", "b2", "a0", "a1", "a2"]


def test_idling_earns_no_credit() -> None:
    s = make()
    s.add(request("a0", max_tokens=40, client="a"))
    s.add(request("a1", client="a", first=300))
    for _ in range(45):
        run_step(s)
    s.add(request("a2", client="a", first=500))
    s.add(request("b0", client="b", first=700))
    s.add(request("b1", client="b", first=900))
    names = order_of_finishing(s)
    assert names.index("a2") < names.index("b1")  # a newcomer that started from nought would go first twice


def test_priority_goes_before_fairness() -> None:
    s = make()
    s.add(request("a0", client="a"))
    s.add(request("a1", client="a", first=300, priority=0))
    s.add(request("b0", client="b", first=500, priority=1))
    assert order_of_finishing(s) == ["a0", "a1", "b0"]


def test_a_deadline_ends_waiting_and_running_requests_and_frees_their_pages() -> None:
    s = make()
    s.add(request("a", max_tokens=30, deadline=10.0))
    s.add(request("b", first=300, deadline=5.0))
    run_step(s)
    assert s.expire(4.9) == []
    assert [r.id for r in s.expire(5.0)] == ["b"]
    assert [(r.id, r.finish_reason) for r in s.expire(100.0)] == [("a", "timeout")]
    assert not s.has_work
    assert s.pool.n_used == 0


def test_forks_compute_one_token_each_and_copy_only_the_page_that_is_written() -> None:
    s = make(max_running=3)
    original = request("a", n_prompt=10)
    s.add(original)
    for name in ("b", "c"):
        s.add(request(name, n_prompt=10, fork_of=original))
    step, _ = run_step(s)
    assert step.by_request() == {"a": 10}
    step, _ = run_step(s)
    assert step.by_request() == {"a": 1, "b": 1, "c": 1}
    forks = step.requests[1:]
    assert all(f.pages[:2] == original.pages[:2] for f in forks)
    assert len({r.pages[2] for r in step.requests}) == 3
    assert step.copies == [(original.pages[2], f.pages[2]) for f in forks]
    order_of_finishing(s)
    assert s.pool.n_used == 0


def test_forks_of_a_request_that_was_cancelled_compute_the_prompt_themselves() -> None:
    s = make(max_running=3)
    original = request("a", n_prompt=40, max_tokens=2)
    s.add(original)
    s.add(request("b", n_prompt=40, max_tokens=2, fork_of=original))
    run_step(s)  # 32 of 40
    s.abort("a")
    step, _ = run_step(s)
    assert step.by_request() == {"b": 8}  # 32 of them are found as any prefix is
    assert order_of_finishing(s) == ["b"]


def test_pages_before_the_window_are_given_back() -> None:
    s = make(page_tokens=4, window=8)
    s.add(request("a", n_prompt=16, max_tokens=40))
    most = 0
    while s.has_work:
        run_step(s)
        most = max(most, s.pool.n_used)
    assert most == 3  # what 8 tokens can touch
    s = make(page_tokens=4)
    s.add(request("a", n_prompt=16, max_tokens=40))
    while s.has_work:
        run_step(s)
        most = max(most, s.pool.n_used)
    assert most == 14


def test_clients_that_come_and_go_while_the_first_one_waits_leave_nothing() -> None:
    s = make()
    s.add(request("running", max_tokens=40))
    run_step(s)
    s.add(request("first", client="first"))
    for i in range(5000):
        s.add(request(f"r{i}", client=f"c{i}"))
        s.abort(f"r{i}")
    assert len(s._waiting._heap) < 200
    assert order_of_finishing(s) == ["running", "first"]
