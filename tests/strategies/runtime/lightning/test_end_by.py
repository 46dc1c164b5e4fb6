"""How a failed fit is told over a store, one that has gone as well, and to ranks that die."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from strategies.errors import ModelError, RunError
from strategies.heartbeat import PHASE, Heartbeat, Phase
from strategies.raised import raised_by
from strategies.runtime.lightning import common_end
from strategies.runtime.lightning.common_end import End, Rank, end_by

CLOSED = RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
LATE = RuntimeError("[/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms")


class Meeting:
    """Notes what happens, in order."""

    def __init__(self, store: Any = None) -> None:
        self.store = HashStore() if store is None else store
        self.is_on, self.done = True, []

    def stay(self) -> None:
        self.done.append("stay")

    def end(self) -> None:
        self.is_on = False
        self.done.append("end")


class Gone:
    def __getattr__(self, name: str) -> Any:
        def lost(*_: Any) -> Any:
            raise RuntimeError("Broken pipe")

        return lost


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ANSWER_S", "_TOGETHER_S", "_REFUSED_S", "_SAVING_S"):
        monkeypatch.setattr(common_end, name, 0.05)


def rank(number: int, *, place: int | None = None, watched: bool = False) -> Rank:
    heartbeat = Heartbeat()
    heartbeat.step(4)
    heartbeat.phase(Phase.SHARING)
    return Rank(number, 2, 3, heartbeat.beat(), place, 20.0, watched)


def end(error: BaseException, number: int, met: Any, **more: Any) -> End:
    settle = met.done.append
    saves = more.pop("saves", False)
    return end_by(error, rank(number, **more), met, saves=saves, settle=settle)


def test_a_rank_that_is_released_raises_what_the_first_one_has_raised() -> None:
    one, other = Meeting(), Meeting()
    other.store = one.store
    mine = ValueError("row 31 is corrupt")
    first = end(mine, 1, one)
    assert first.error is mine
    assert first.why == "rank 1 alone has failed (ValueError: row 31 is corrupt)"
    second = end(CLOSED, 0, other)
    assert (type(second.error), str(second.error)) == (ValueError, "row 31 is corrupt")
    assert raised_by(second.error) == 1 and second.why == "rank 1 has failed"
    # What is being written is waited for before connections end.
    assert one.done[0] == other.done[0] == common_end._SAVING_S
    assert one.done[1] == other.done[1] == "end"


def test_a_store_that_has_gone_leaves_each_rank_its_own_error() -> None:
    for error in (ValueError("mine"), CLOSED, LATE):
        met = Meeting(Gone())
        found = end(error, 1, met, saves=True)
        assert found.error is error and found.why == "another rank has ended"
        assert met.done == ["end"]


def test_words_of_another_program_in_the_store_are_no_error_of_a_rank() -> None:
    met = Meeting()
    met.store.set("failed/0", "no JSON")
    assert end(CLOSED, 1, met).error is CLOSED
    assert not met.is_on
    met = Meeting()
    met.store.set("failed/0", json.dumps({"number": 1}))
    assert end(CLOSED, 1, met).error is CLOSED


def test_a_rank_that_was_killed_is_lost_for_the_others_and_nothing_else() -> None:
    met = Meeting()
    found = end(CLOSED, 0, met)
    assert found == End(CLOSED, "another rank has ended") and not met.is_on


def test_an_interrupt_while_ranks_are_told_ends_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(common_end, "until", interrupted)
    met = Meeting()
    with pytest.raises(KeyboardInterrupt):
        end(ValueError("mine"), 0, met)
    assert not met.is_on


def test_ranks_that_refuse_alike_stay_connected() -> None:
    place = PHASE | Phase.SETTING_UP
    one, other = Meeting(), Meeting()
    told = {"late": False, "step": 3, "place": place, "kind": "strategies.errors:ModelError"}
    one.store.set("failed/0", json.dumps({**told, "number": 1, "doing": "", "rank": 0}))
    mine = ModelError("no")
    found = end(mine, 1, one, place=place)
    assert found.error is mine and found.why is None
    assert found.comes is not None and not found.comes()  # the other one does not come to save
    assert one.is_on and one.done == ["stay"]
    other.store = HashStore()
    other.store.set("failed/0", json.dumps({**told, "number": 1, "doing": "", "rank": 0}))
    assert end(ModelError("no"), 1, other, place=None).why == (
        "ranks 0, 1 have failed, not at the same place (ModelError: no)"
    )


def test_the_first_rank_to_decide_whether_all_fail_alike_decides_for_all() -> None:
    place = PHASE | Phase.SETTING_UP
    first, second = Meeting(), Meeting()
    second.store = first.store
    mine = ModelError("no")
    assert end(mine, 0, first, place=place).why == "rank 0 alone has failed (ModelError: no)"
    assert end(mine, 1, second, place=place).why is not None  # although all have told by now
    assert not second.is_on


def test_a_wait_in_vain_names_places_and_key_but_where_a_launcher_does() -> None:
    met = Meeting()
    found = end(LATE, 0, met)
    assert type(found.error) is RunError
    assert str(found.error) == (
        "a rank has waited for another one for timeout_s=20 s. rank 0 waits at step 4 in sharing "
        "loss and logs with all ranks of its pipeline; rank 1 waits for no other rank: its loader, "
        "a callback or a step. Try a larger PipelineStrategy(timeout_s=...), if that may take so "
        "long."
    )
    assert end(LATE, 0, Meeting(), watched=True).error is LATE
