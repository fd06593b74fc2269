"""The minimum cut of a graph: the nodes of the least size in all that every path to some nodes goes through.

By the flow of Ford and Fulkerson (1956) along shortest paths (Edmonds and Karp 1972). Each node is an edge with its
size as capacity.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Hashable)
_SOURCE, _SINK = "source", "sink"
_Room = dict[Any, dict[Any, float]]
"""Edge -> what may still flow along it; nodes are (node, "in") and (node, "out")."""


def minimum_cut(
    before: Mapping[Node, Iterable[Node]], sizes: Mapping[Node, float], targets: Iterable[Node]
) -> set[Node] | None:
    """Return the cut that is nearest to the targets; None if each has a node of infinite size.

    Args:
        before: each node -> those that lead to it; one that none leads to is where paths begin.
        sizes: of the nodes.
        targets: where paths end.
    """
    room = _network(before, sizes, targets)
    while path := _path(room):
        flow = min(room[a][b] for a, b in path)
        if math.isinf(flow):
            return None
        for a, b in path:
            room[a][b] -= flow
            room[b][a] += flow
    reaching, waiting = set[Any]((_SINK,)), list[Any]((_SINK,))
    while waiting:
        end = waiting.pop()
        found = [start for start in room.get(end, {}) if start not in reaching and room[start][end] > 0]
        reaching.update(found)
        waiting += found
    return {node for node in before if (node, "out") in reaching and (node, "in") not in reaching}


def _network(before: Mapping[Any, Iterable[Any]], sizes: Mapping[Any, float], targets: Iterable[Any]) -> _Room:
    room = _Room()

    def edge(start: Any, end: Any, size: float) -> None:
        room.setdefault(start, {})[end] = size
        room.setdefault(end, {}).setdefault(start, 0.0)

    for node, leading in before.items():
        edge((node, "in"), (node, "out"), sizes[node])
        starts = [(each, "out") for each in leading] or [_SOURCE]
        for start in starts:
            edge(start, (node, "in"), math.inf)
    for node in targets:
        edge((node, "out"), _SINK, math.inf)
    return room


def _path(room: _Room) -> list[tuple[Any, Any]]:
    """Return the edges of a shortest path with room on it; [] if there is none."""
    came, waiting = dict[Any, Any]({_SOURCE: None}), deque[Any]([_SOURCE])
    while waiting and _SINK not in came:
        start = waiting.popleft()
        for end, size in room.get(start, {}).items():
            if size > 0 and end not in came:
                came[end] = start
                waiting.append(end)
    path, end = list[tuple[Any, Any]](), _SINK
    while came.get(end) is not None:
        path.append((came[end], end))
        end = came[end]
    return path
