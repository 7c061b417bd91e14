"""The registry is pure: who serves what, for how long, who may say so, and who is introduced to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.bootstrap import keys, registry
from pdxfer.bootstrap.registry import UNHEARD_PAUSE, Answer, Leases, Registry, Said
from pdxfer.bootstrap.settings import NodeEntry, RegistrySettings
from pdxfer.core.messages import Announce, Located, Lookup

KEYS = {name: keys.generate().public for name in ("s", "p", "d", "x")}
AT = {name: f"tcp://10.0.0.{n}:7971" for n, name in enumerate(KEYS, 1)}
TTL = 9.0


def announce(node: str, *engines: str, ttl: float = TTL) -> Announce:
    return Announce(AT[node], KEYS[node], engines, ttl)


def located(engine: str, node: str, incarnation: int = 1) -> Located:
    return Located(engine, node, AT[node], KEYS[node], incarnation)


NOBODY = ("", "", "", 0)


# leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_runs_out() -> None:
    leases = Leases()
    leases.announce("p", 1, announce("p", "e", "f"), 0.0)
    assert leases.lookup("e", TTL - 0.1) == located("e", "p") and leases.count(TTL - 0.1) == 2
    assert leases.lookup("e", TTL) == Located("e", *NOBODY) and leases.count(TTL) == 0


def test_a_lease_is_renewed_and_follows_what_is_announced() -> None:
    leases = Leases()
    leases.announce("p", 1, announce("p", "e", "f"), 0.0)
    leases.announce("p", 1, announce("p", "f", "g"), 5.0)
    assert [leases.lookup(e, 10.0).node for e in "efg"] == ["", "p", "p"]
    leases.announce("p", 1, announce("p"), 11.0)
    assert leases.count(11.0) == 0
    assert leases.introduce("p", 11.0) == located("", "p")  # it lives, though it serves nothing


def test_only_a_newer_incarnation_replaces_another() -> None:
    leases = Leases()
    leases.announce("p", 2, announce("p", "e"), 0.0)
    leases.announce("p", 1, announce("p", "f"), 1.0)
    assert [leases.lookup(e, 1.0).node for e in "ef"] == ["p", ""]
    leases.announce("p", 3, announce("p", "f"), 2.0)
    assert leases.lookup("f", 2.0).incarnation == 3 and leases.lookup("e", 2.0).node == ""


def test_a_live_lease_of_another_node_stays() -> None:
    leases = Leases()
    leases.announce("p", 1, announce("p", "e"), 0.0)
    leases.announce("d", 1, announce("d", "e", "f"), 1.0)
    assert [leases.lookup(e, 1.0).node for e in "ef"] == ["p", "d"]
    leases.announce("d", 1, announce("d", "e", "f"), TTL)
    assert leases.lookup("e", TTL).node == "d"


def test_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_LEASES", 5)
    leases = Leases()
    leases.announce("p", 1, announce("p", *"abcd"), 0.0)
    leases.announce("d", 1, announce("d", *"efgh"), 0.0)
    assert leases.count(0.0) == 5 and leases.lookup("e", 0.0).node == "d" and leases.lookup("f", 0.0).node == ""


def test_renewing_for_ever_needs_no_more_memory() -> None:
    leases = Leases()
    for n in range(10_000):
        leases.announce("p", 1, announce("p", "e", ttl=3600), n / 100)
    assert len(leases._ends) < 2000
    assert leases.lookup("e", 99.0 + 3600).node == "p"


@given(
    st.lists(
        st.tuples(st.sampled_from("pdx"), st.integers(1, 3), st.frozensets(st.sampled_from("abc")), st.floats(0, 6)),
        max_size=30,
    )
)
def test_the_index_and_the_holders_agree(steps: list[tuple[str, int, frozenset[str], float]]) -> None:
    leases, now = Leases(), 0.0
    for node, incarnation, engines, pause in steps:
        now += pause
        leases.announce(node, incarnation, announce(node, *engines), now)
        assert {e: n for n, h in leases._holders.items() for e in h.engines} == leases._engines
        assert all(h.until > now for h in leases._holders.values())


# the static back end -----------------------------------------------------------------------------------------------


def test_static() -> None:
    entry = NodeEntry("p", AT["p"], KEYS["p"], ("e",))
    r = Registry(RegistrySettings(nodes=(entry,)), "d", 1, KEYS["d"])
    assert r.resolve("e", 0.0) == (Answer("e", "p", 0, "", AT["p"], KEYS["p"]), [])
    assert r.resolve("f", 0.0) == (Answer("f", "", 0, "unknown_engine"), [])
    assert r.due(("x",), AT["d"], 0.0) == [] and r.problem(1e9) is None
    with pytest.raises(ValueError, match="takes this node for the registry; it is kept by 'nobody'"):
        r.on_message("p", 1, Lookup("e"), 0.0, key=KEYS["p"])
    with pytest.raises(ValueError, match="answers a lookup"):
        r.on_message("p", 1, located("e", "p"), 0.0, key=KEYS["p"])
    r.reload(RegistrySettings(nodes=()))
    assert r.resolve("e", 0.0)[0] == Answer("e", "", 0, "unknown_engine")


# the embedded back end ---------------------------------------------------------------------------------------------


def node(name: str, incarnation: int = 1) -> Registry:
    return Registry(RegistrySettings(kind="embedded", server="s", ttl=TTL), name, incarnation, KEYS[name])


class Cluster:
    """Registries that talk at once; ``lost`` says which node hears nothing."""

    def __init__(self, *names: str) -> None:
        self.nodes = {name: node(name) for name in names}
        self.engines: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
        self.answers: list[tuple[str, Answer]] = []
        self.lost: set[str] = set()
        self.now = 0.0

    def carry(self, source: str, said: list[Said]) -> None:
        for target, message in said:
            if target in self.nodes and not self.lost & {source, target}:
                answer, more = self.nodes[target].on_message(source, 1, message, self.now, key=KEYS[source])
                if answer is not None:
                    self.answers.append((target, answer))
                self.carry(target, more)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            for name, one in self.nodes.items():
                self.carry(name, one.due(self.engines[name], AT[name], self.now))
                self.answers += [(name, answer) for answer in one.settled(self.now)]
            self.now += 0.25

    def resolve(self, name: str, engine: str) -> Answer | None:
        answer, said = self.nodes[name].resolve(engine, self.now)
        if answer is not None:
            return answer
        before = len(self.answers)
        self.carry(name, said)
        found = [a for n, a in self.answers[before:] if n == name and a.engine_id == engine]
        return found[0] if found else None


def test_an_engine_is_found_and_its_node_is_introduced_to_the_asker() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.run(5.0)
    assert all(r.problem(c.now) is None for r in c.nodes.values())
    assert c.answers == []
    assert c.resolve("d", "e") == Answer("e", "p", 1, "", AT["p"], KEYS["p"])
    assert ("p", Answer("", "d", 1, "", AT["d"], KEYS["d"])) in c.answers
    assert c.resolve("s", "e") == Answer("e", "p", 1, "", AT["p"], KEYS["p"])
    assert c.resolve("d", "none") == Answer("none", "", 0, "unknown_engine")


def test_until_the_two_have_met_the_lookup_is_repeated_and_the_introduction_with_it() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.run(5.0)
    introduction = ("p", Answer("", "d", 1, "", AT["d"], KEYS["d"]))
    for _ in range(2):  # the second time from the cache
        c.answers.clear()
        assert c.resolve("d", "e") is not None
        c.run(0.75)
        assert c.answers.count(introduction) >= 3
        assert not [a for n, a in c.answers if n == "d" and a.engine_id == "e"][1:]  # it is answered once
        c.nodes["d"].heard("p", c.now)
        c.answers.clear()
        c.run(0.25)
        assert c.answers == []
    c.run(2.5)
    assert c.resolve("d", "e") is not None
    c.run(TTL + 0.5)
    c.answers.clear()
    c.run(2.0)
    assert c.answers == []  # nor for ever


def test_a_dead_node_is_forgotten_and_an_answer_is_used_again_for_a_moment() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.run(5.0)
    assert c.resolve("d", "e") is not None
    asked = len(c.answers)
    assert c.resolve("d", "e") is not None and len(c.answers) == asked  # from the cache
    c.lost.add("p")
    c.run(TTL + 1)
    assert c.resolve("d", "e") == Answer("e", "", 0, "unknown_engine")


def test_a_registry_that_does_not_answer_is_a_problem_and_questions_are_repeated() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.lost.add("s")
    c.run(3.0)
    assert c.nodes["d"].problem(c.now) == "node 's' has not answered yet"
    assert c.resolve("d", "e") is None
    c.lost.clear()
    c.run(2 * UNHEARD_PAUSE)
    assert ("d", Answer("e", "p", 1, "", AT["p"], KEYS["p"])) in c.answers
    assert c.nodes["d"].problem(c.now) is None
    c.lost.add("s")
    c.run(TTL + 3)
    assert "has not answered for 1" in str(c.nodes["d"].problem(c.now))


def test_a_restarted_registry_does_not_deny_what_it_has_not_heard_of_yet() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.run(10.0)
    c.nodes["s"] = node("s")
    assert c.resolve("d", "e") is None
    assert c.resolve("s", "e") is None
    c.run(TTL / 3 + 2 * UNHEARD_PAUSE)
    found = Answer("e", "p", 1, "", AT["p"], KEYS["p"])
    assert ("d", found) in c.answers and ("s", found) in c.answers
    assert c.resolve("s", "none") == Answer("none", "", 0, "unknown_engine")


def test_while_the_registry_is_silent_its_last_word_holds_as_long_as_a_lease() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.run(5.0)
    known = c.resolve("d", "e")
    assert known is not None and known.node == "p"
    c.lost.add("s")
    c.run(2.5)  # longer than an answer is used without asking
    assert c.resolve("d", "e") == known
    assert Said("s", Lookup("e")) in c.nodes["d"].resolve("e", c.now)[1], "it is asked all the same"
    assert c.resolve("d", "other") is None, "what was never answered has no last word"
    c.run(TTL)
    assert c.resolve("d", "e") is None, "a lease would be over"


def test_the_last_word_holds_on_while_that_node_itself_is_heard() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.run(5.0)
    known = c.resolve("d", "e")
    c.lost.add("s")
    for _ in range(12):
        c.run(TTL / 3)
        c.nodes["d"].heard("p", c.now)
    assert c.resolve("d", "e") == known
    c.nodes["d"].forget("e")  # the node itself has denied it
    assert c.resolve("d", "e") is None
    c.lost.clear()
    c.run(5.0)  # they announce themselves again
    assert c.resolve("d", "e") == known


def test_a_question_that_met_silence_is_settled_by_the_last_word() -> None:
    c = Cluster("s", "p", "d")
    c.engines["p"] = ("e",)
    c.run(5.0)
    known = c.resolve("d", "e")
    c.nodes["d"].heard("p", c.now)
    c.run(2.5)
    c.lost.add("s")
    c.answers.clear()
    assert c.resolve("d", "e") is None, "it may still answer"
    c.run(2 * UNHEARD_PAUSE + 0.25)
    assert c.answers == [("d", known)], "once"


def test_a_question_that_nobody_answers_is_given_up() -> None:
    d = node("d")
    d.resolve("e", 0.0)
    assert Said("s", Lookup("e")) in d.due((), AT["d"], TTL)
    assert Said("s", Lookup("e")) not in d.due((), AT["d"], TTL + 1)


def test_engines_are_announced_as_soon_as_they_change() -> None:
    d = node("d")
    assert Said("s", announce("d")) in d.due((), AT["d"], 0.0)
    d.on_message("s", 1, Located("", *NOBODY), 0.0, key=KEYS["s"])
    assert d.due((), AT["d"], 0.1) == []
    assert Said("s", announce("d", "e")) in d.due(("e",), AT["d"], 0.2)


@pytest.mark.parametrize(
    ("to", "source", "message", "says"),
    [
        ("d", "p", located("e", "p"), "node 'p' answers a lookup, the registry is kept by 's'"),
        ("d", "p", Lookup("e"), "takes this node for the registry; it is kept by 's'"),
        ("s", "p", Announce(AT["p"], KEYS["x"], ("e",), TTL), "expected its own"),
        ("s", "p", Announce("tcp://*:1", KEYS["p"], ("e",), TTL), "expected one that peers can connect to"),
        ("d", "s", Located("e", "p", "inproc://x", KEYS["p"], 1), "expected an address that peers can connect to"),
        ("d", "s", Located("e", "p", AT["p"], "nonsense", 1), "and a key"),
    ],
)
def test_what_nobody_may_say(to: str, source: str, message: Announce | Lookup | Located, says: str) -> None:
    r = node(to)
    r.resolve("e", 0.0)
    with pytest.raises(ValueError, match=says):
        r.on_message(source, 1, message, 0.0, key=KEYS[source])
    assert r.leases is None or r.leases.count(0.0) == 0
