"""Our branch of the notification policy. The tree is one object that is replaced as a whole, and it is others', too."""

import copy
from typing import Any, Final

RECEIVER: Final = "stagewatch"
MATCHER: Final = ["team", "=", "stagewatch"]

Tree = dict[str, Any]


def route() -> Tree:
    """Alerts of our rules go to our contact point, those of one engine together."""
    return {
        "receiver": RECEIVER,
        "object_matchers": [list(MATCHER)],
        "group_by": ["alertname", "deployment", "engine"],
        "continue": False,
    }


def merged(tree: Tree) -> Tree:
    """The tree with our route in it, once, and first; everything else as it was."""
    made = copy.deepcopy(tree)
    routes = list(made.get("routes") or [])
    places = [place for place, each in enumerate(routes) if is_ours(each)]
    if places:
        routes[places[0]] = routes[places[0]] | route()
        routes = [each for place, each in enumerate(routes) if place not in places[1:]]
    else:
        routes.insert(0, route())
    made["routes"] = routes
    return made


def without(tree: Tree) -> Tree:
    """The tree without our route; everything else as it was."""
    made = copy.deepcopy(tree)
    if made.get("routes"):
        made["routes"] = [each for each in made["routes"] if not is_ours(each)]
    return made


def is_ours(each: Tree) -> bool:
    """Whether a route is the one we make: to our contact point, by our label."""
    return each.get("receiver") == RECEIVER and MATCHER in each.get("object_matchers", [])
