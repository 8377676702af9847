"""The rules of the house: who may import whom, how long a module may be, what the wheel holds."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("schemas", "streams", "operators", "pipeline")
"""In the order of dependency: each may import itself and those before it."""
HEAVY = {"torch", "vllm", "ray", "transformers"}


def modules(folder: str) -> Iterator[Path]:
    yield from sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_depend_on_each_other_downwards_only(folder: str) -> None:
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(folder)
        for line, name in imports(path)
        if name.startswith(".")
        or name.split(".")[0] in (*FOLDERS, "tests", "benchmarks")
        or (name.startswith("laminar.") and name.split(".")[1] not in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["schemas", "streams"])
def test_schemas_and_streams_import_no_torch_vllm_or_ray(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(folder)
        for line, name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_only_the_kafka_adapter_the_registry_and_the_broker_import_confluent_kafka() -> None:
    allowed = {ROOT / "streams" / "kafka", ROOT / "streams" / "broker", ROOT / "streams" / "registry"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in modules(folder)
        for line, name in imports(path)
        if name.split(".")[0] == "confluent_kafka" and path.parent not in allowed
    ]
    assert wrong == []


def test_no_module_is_longer_than_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): n
        for folder in (*FOLDERS, "tests", "benchmarks")
        for path in modules(folder)
        if (n := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert long == {}


def test_every_folder_is_a_link_of_the_import_bridge() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "laminar" / folder
        assert link.is_symlink()
        assert not Path(link.readlink()).is_absolute()
        assert link.resolve() == ROOT / folder


def test_the_wheel_holds_exactly_the_modules_of_the_folders(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in (*FOLDERS, "src"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)],
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"laminar/__init__.py", "laminar/py.typed"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".avsc") and "__pycache__" not in path.parts:
                expected.add(f"laminar/{path.relative_to(ROOT)}")
    assert inside == expected


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from laminar.pipeline.cli import main\n"
        "sys.argv = ['laminar', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as done:\n    assert not done.code, done.code\n"
        "print(','.join(sorted(m for m in sys.modules if '.' not in m)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.strip().splitlines()[-1].split(","))
    heavy = {*HEAVY, "confluent_kafka", "fastavro", "numpy", "pandas", "polars", "pyarrow", "pydantic", "yaml"}
    assert loaded & heavy == set()
    assert "run" in done.stdout
