"""Sessions of agents, and random ways to split them into rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.support.estimator_formulas import Sample


@dataclass
class Turn:
    """A model call: the tokens of its response, and what the agent observes after it."""

    tokens: list[int]
    observed: list[int]
    trained: bool
    values: list[float]
    penalties: list[float]


@dataclass
class Context:
    """Turns of which each begins with all before it."""

    prompt: list[int]
    turns: list[Turn]


@dataclass
class Row:
    """A training sequence."""

    key: str
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    penalties: list[float] = field(default_factory=list)
    actions: list[tuple[int, int] | None] = field(default_factory=list)
    """Of each token of the response: number of its turn in the session, and its own in the turn;
    None if untrained."""
    extends: int | None = None  # number of the row of its session that it continues

    def add(self, tokens, values=(), penalties=(), turn=None):
        """Adds tokens to the response; those of a turn are trained."""
        self.response += tokens
        self.mask += [int(turn is not None)] * len(tokens)
        self.values += values if turn is not None else [7.0] * len(tokens)
        self.penalties += penalties if turn is not None else [0.0] * len(tokens)
        self.actions += [None if turn is None else (turn, place) for place in range(len(tokens))]


@dataclass
class Session:
    name: str
    reward: float
    contexts: list[Context]

    @property
    def trained(self):
        return [turn for context in self.contexts for turn in context.turns if turn.trained]

    @property
    def sample(self):
        of = {
            name: [x for turn in self.trained for x in getattr(turn, name)]
            for name in ("values", "penalties")
        }
        return Sample(self.name.split("_")[0], self.reward, **of)

    def in_one_row(self):
        """Contexts one after the other; prompts of all but the first are as if they were
        observed."""
        row, number = Row(f"{self.name}_0", self.contexts[0].prompt), 0
        for context in self.contexts:
            if number:
                row.add(context.prompt)
            for turn in context.turns:
                row.add(turn.tokens, turn.values, turn.penalties, number if turn.trained else None)
                row.add(turn.observed)
                number += 1
        return row


EIGHTHS = st.integers(-16, 16).map(lambda number: number / 8)


@st.composite
def sessions(draw, *, said):
    """Two prompts of two or three sessions each.

    Args:
        said: whether the agent loop says which rows continue others. If it does, any tokens may be
            equal by chance; if not, only those of contexts of one turn, which an agent meets twice.
    """
    fresh = iter(range(100, 1 << 20))

    def tokens(least, most):
        length = draw(st.integers(least, most))
        return [draw(st.integers(1, 2)) if said else next(fresh) for _ in range(length)]

    def turn(trained):
        response = tokens(1, 3)
        values, penalties = ([draw(EIGHTHS) for _ in response] for _ in range(2))
        return Turn(
            response, tokens(0, 2), trained and draw(st.integers(0, 4)) > 0, values, penalties
        )

    found = []
    names = [f"{uid}_{number}" for uid in "ab" for number in range(draw(st.integers(2, 3)))]
    untrained = draw(st.sampled_from([None, *names]))
    for name in names:
        contexts = []
        for _ in range(draw(st.integers(1, 4))):
            met = [context for context in contexts if said or len(context.turns) == 1]
            if met and draw(st.booleans()):
                again = draw(st.sampled_from(met))
                turns = [
                    Turn(t.tokens, t.observed, t.trained, [v + 1 for v in t.values], t.penalties)
                    for t in again.turns
                ]
                contexts.append(Context(again.prompt, turns))
            else:
                turns = [turn(name != untrained) for _ in range(draw(st.integers(1, 3)))]
                contexts.append(Context(tokens(1, 2), turns))
        session = Session(name, draw(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.0])), contexts)
        if name != untrained and not session.trained:
            contexts[0].turns[0].trained = True
        found.append(session)
    return found


@st.composite
def split(draw, session, *, said, again=True):
    """The rows of a session, split somehow.

    Args:
        again: whether a row may train what an earlier row that it continues trains.
    """
    rows = []
    number = 0

    def untrained_row():
        if draw(st.integers(0, 3)) == 0:
            row = Row("", [3])
            row.add([4] * draw(st.integers(0, 2)))
            if said and rows:  # a copy of another one, rejected
                copied = draw(st.sampled_from(rows))
                row = Row("", copied.prompt)
                row.add(copied.response)
            rows.append(row)

    for context in session.contexts:
        done, before = 0, None
        while done < len(context.turns):
            untrained_row()
            end = (
                draw(st.integers(done + 1, len(context.turns)))
                if said or len(context.turns) > 1
                else 1
            )
            start = draw(st.integers(0, done))
            asked = [
                token for turn in context.turns[:start] for token in turn.tokens + turn.observed
            ]
            row = Row("", context.prompt + asked, extends=before)
            for place in range(start, end):
                turn = context.turns[place]
                trains = turn.trained and (place >= done or (again and draw(st.booleans())))
                row.add(
                    turn.tokens, turn.values, turn.penalties, number + place if trains else None
                )
                row.add(turn.observed)
            before, done = len(rows), end
            rows.append(row)
        number += len(context.turns)
    untrained_row()
    for index, row in enumerate(rows):
        row.key = f"{session.name}_{index}"
    return rows
