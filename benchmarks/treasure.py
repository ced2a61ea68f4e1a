"""A text game of several turns: find the key, then the chest."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.core.types import Score
from palestra.envs.env import Env, EnvConfig
from palestra.evals.measures import fail_reason, pass_reason

Room = tuple[int, int]

WAYS = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
_NAMES = "hall kitchen cellar study attic library garden stable chapel tower pantry vault".split()
_KEY_WORTH = 0.3


class TreasureConfig(EnvConfig):
    """How large the house is."""

    width: int = Field(3, ge=2, le=4, description="rooms from west to east")
    height: int = Field(2, ge=1, le=3, description="rooms from north to south")
    spare_turns: int = Field(4, ge=0, le=10_000, description="turns beyond the shortest way")


class Treasure(Env):
    """Find the key in a house, then open the chest with it: one command a turn."""

    name = "treasure"
    works_in_forks = True
    instructions = (
        "You are in a house. Each turn, say one command and nothing else: go north, go south, go east, go west, "
        "take key, or open chest. The chest needs the key."
    )
    env_config_cls: ClassVar[type[BaseModel]] = TreasureConfig
    pass_threshold = 1.0

    def make_problem(self, rng: random.Random) -> Any:
        rooms = [(x, y) for x in range(self.config.width) for y in range(self.config.height)]
        names = dict(zip(rooms, rng.sample(_NAMES, len(rooms)), strict=True))
        start, key, chest = rng.sample(rooms, 3)
        turns = len(way(start, key)) + len(way(key, chest)) + 2 + self.config.spare_turns
        row = {"names": names, "start": start, "key": key, "chest": chest, "turns": turns}
        return row | {"input": _look(names, start, key, chest, False), "expect": (key, chest)}

    def start(self) -> None:
        self.place: Room = self.problem.row["start"]
        self.has_key = self.opened = False
        self.turn = 0

    def step(self, answer: str) -> str | None:
        row = self.problem.row
        self.turn += 1
        result = self._act(" ".join(answer.lower().strip(" .!").split()))
        if self.opened or self.turn >= row["turns"]:
            return None
        return f"{result} {_look(row['names'], self.place, row['key'], row['chest'], self.has_key)}".strip()

    def _act(self, command: str) -> str:
        verb, _, what = command.partition(" ")
        row = self.problem.row
        if verb == "go" and what in WAYS:
            there = _beside(self.place, what)
            if there not in row["names"]:
                return "There is a wall."
            self.place = there
            return ""
        if command == "take key" and self.place == row["key"] and not self.has_key:
            self.has_key = True
            return "You have the key."
        if command == "open chest" and self.place == row["chest"]:
            self.opened = self.has_key
            return "It is locked." if not self.has_key else "It is open!"
        return "That does nothing."

    def score(self, answer: str) -> Score:
        if self.opened:
            return pass_reason(f"opened the chest in turn {self.turn}")
        if self.has_key:
            return Score(_KEY_WORTH, False, "found the key, did not open the chest")
        return fail_reason("did not find the key")


def _look(names: dict[Room, str], place: Room, key: Room, chest: Room, has_key: bool) -> str:
    doors = [f"{way} to the {names[there]}" for way in WAYS if (there := _beside(place, way)) in names]
    things = [thing for thing, at in (("a key", key), ("a chest", chest)) if at == place]
    here = [thing for thing in things if not (thing == "a key" and has_key)]
    return (
        f"You are in the {names[place]}. "
        + (f"You see {' and '.join(here)}. " if here else "")
        + (f"Doors lead {', '.join(doors)}.")
    )


def _beside(place: Room, direction: str) -> Room:
    dx, dy = WAYS[direction]
    return place[0] + dx, place[1] + dy


def way(start: Room, goal: Room) -> list[str]:
    """The shortest way between two rooms, as directions: the house has all rooms of its rectangle."""
    east, south = goal[0] - start[0], goal[1] - start[1]
    return ["east" if east > 0 else "west"] * abs(east) + ["south" if south > 0 else "north"] * abs(south)
