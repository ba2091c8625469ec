"""Imports go one way between the rooms (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

import videokv

ROOT = Path(videokv.__file__).parent
STEPS = [
    {"stopping", "outputs", "devices", "command_line"},
    {"tensors"},
    {"rotation"},
    {"noise"},
    {"protocols"},
    {"kernels"},
    {"quantizers", "corrections", "cache", "attention", "metrics", "diagnostics"},
    {"recipes"},
    {"adapters", "worldmodel"},
    {"studies"},
    {"report"},
    {"cli"},
    {"entry"},
]
RANK = {room: rank for rank, rooms in enumerate(STEPS) for room in rooms}
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def room_of(path):
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path):
    """(line, dotted name) of everything imported in a file, inside functions too."""
    package = ("videokv", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def wrong_imports(path):
    here = room_of(path)
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] != "videokv" or len(parts) < 2 or parts[1] not in RANK:
            continue
        there = parts[1]
        if there != here and not RANK[there] < RANK[here]:
            yield f"{path.relative_to(ROOT)}:{line}: {here} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    if room_of(path) not in RANK:
        pytest.skip(f"{path.name} re-exports public names")
    assert list(wrong_imports(path)) == []


def test_every_folder_is_a_room():
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(RANK)


def test_the_rule_sees_a_wrong_import(tmp_path, monkeypatch):
    room = tmp_path / "cache"
    room.mkdir()
    wrong = "def f():\n    from videokv.attention import attend\n\nfrom .. import recipes\n"
    (room / "bad.py").write_text(wrong + "from videokv.tensors import held_bytes\nimport torch\n")
    monkeypatch.setattr("test_import_rules.ROOT", tmp_path)
    found = list(wrong_imports(room / "bad.py"))
    assert sorted(text.split(": ")[1] for text in found) == [
        "cache imports videokv.attention.attend",
        "cache imports videokv.recipes",
    ]
