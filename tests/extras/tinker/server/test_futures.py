"""The order of a model's requests, and what is kept of answers."""

import itertools

import pytest

from palestra.core.errors import PalestraError, StateError
from palestra.extras.tinker.server import futures
from palestra.extras.tinker.server.futures import Gone, OrderedWorker, Requests, TooBusy


@pytest.mark.parametrize("arrival", list(itertools.permutations([1, 2, 3, 4]))[::5])
def test_requests_are_done_by_number_whatever_order_they_arrive_in(arrival: tuple[int, ...]) -> None:
    worker, done = OrderedWorker("m", Requests()), []

    def work(number: int) -> dict[str, int]:
        done.append(number)
        return {"n": number}

    sent = {n: worker.submit(n, "forward_backward", lambda n=n: work(n)) for n in arrival for _ in range(2)}
    assert [sent[n].future.result(5) for n in sorted(arrival)] == [{"n": n} for n in sorted(arrival)]
    assert done == [1, 2, 3, 4]


def test_a_repeated_number_is_the_same_request_and_a_reused_or_far_one_is_refused() -> None:
    worker = OrderedWorker("m", Requests())
    first = worker.submit(1, "forward_backward", dict)
    assert worker.submit(1, "forward_backward", dict) is first
    with pytest.raises(StateError, match="was a forward_backward before and is a optim_step now"):
        worker.submit(1, "optim_step", dict)
    with pytest.raises(StateError, match="numbers begin at 1"):
        worker.submit(0, "optim_step", dict)
    with pytest.raises(TooBusy, match="which has not come yet"):
        worker.submit(futures.MAX_AHEAD + 2, "optim_step", dict)


def test_what_waits_for_a_missing_request_is_told_when_the_model_ends() -> None:
    worker = OrderedWorker("m", Requests())
    early = worker.submit(2, "optim_step", dict)
    worker.close("the model has ended")
    with pytest.raises(Gone, match="has ended"):
        early.future.result(5)


def test_a_failure_is_the_answer_of_its_request_alone() -> None:
    worker = OrderedWorker("m", Requests())

    def fail() -> dict[str, int]:
        raise PalestraError("no")

    first, second = worker.submit(1, "a", fail), worker.submit(2, "a", dict)
    assert second.future.result(5) == {}
    with pytest.raises(PalestraError, match="no"):
        first.future.result(5)


def test_answers_that_were_fetched_longest_ago_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "KEPT_BYTES", 10)
    requests = Requests()
    sent = [requests.new("sample") for _ in range(3)]
    for request in sent:
        request.future.set_result(b"12345")
        requests.fetched(request)
        requests.fetched(request)
    with pytest.raises(Gone, match="fetched long ago"):
        requests.find(sent[0].id)
    assert requests.find(sent[1].id) is sent[1]
