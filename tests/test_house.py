"""The house rules that no other tool checks: what is in the repository, what it is called, what starts how."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# One letter of each stands in brackets, so that this file names none of them itself.
PLACES = re.compile(
    r"(?<![\w.])/[w]ork/|(?<![\w.])/[r]oot/|(?<![\w.])/[h]ome/\w|python[h]osted|py[p]i\.org|npm[j]s\.|deb\.[d]ebian"
)
HOLLOW_NAME = re.compile(r"manager|helper|utils?|common|misc|handler|info|data")
LOCK_ENTRY = re.compile(r"([a-z0-9-]+)==([^\s;]+)(?: ; [^\\]+)? \\")
LOCK_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")
FRAGMENT = re.compile(r"(?:\d+|\+[a-z0-9-]+)(?:\.\d+)?\.(?:added|changed|fixed|removed)\.md")

# Files that torch types too loosely for strict checking. They begin with `# pyright: standard`.
TORCH_HEAVY = re.compile(
    r"src/dougong/run/(?:frameworks/|attach|worker|preflight_worker|fingerprint|restore|dcp|group|alone|reducers|sharding"
    r"|reshard|shared_read|optimizer_state)\w*\.py"
)


@cache
def repository_files() -> tuple[Path, ...]:
    """Every file that is, or is about to be, in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read_lock(name: str) -> dict[str, str]:
    """Versions by package name."""
    entries = (LOCK_ENTRY.fullmatch(line) for line in (ROOT / "requirements" / name).read_text().splitlines())
    return {entry[1]: entry[2] for entry in entries if entry}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirement_names(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {re.split(r"[^A-Za-z0-9._-]", str(requirement))[0].lower() for requirement in requirements}


def test_no_file_names_a_place_outside_the_project() -> None:
    found: list[str] = []
    for path in repository_files():
        text = path.read_bytes().decode(errors="ignore")
        found += [f"{relative(path)}: {match[0]}" for match in PLACES.finditer(text)]
    assert found == []


def test_no_module_has_a_hollow_name() -> None:
    modules = [path for path in repository_files() if path.suffix == ".py" and relative(path).startswith("src/")]
    assert [relative(path) for path in modules if HOLLOW_NAME.fullmatch(path.stem)] == []


@pytest.mark.parametrize("name", ["run.txt", "dev.txt", "frameworks.txt"])
def test_a_lock_holds_pinned_names_and_hashes_only(name: str) -> None:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    assert [line for line in lines if not LOCK_ENTRY.fullmatch(line) and not LOCK_HASH.fullmatch(line)] == []


@pytest.mark.parametrize("name", ["run.txt", "dev.txt", "frameworks.txt"])
def test_every_locked_package_has_a_hash(name: str) -> None:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    heads = [index for index, line in enumerate(lines) if LOCK_ENTRY.fullmatch(line)]
    assert heads
    assert [lines[index] for index in heads if not LOCK_HASH.fullmatch(lines[index + 1])] == []


def test_the_locks_agree() -> None:
    run, dev, frameworks = read_lock("run.txt"), read_lock("dev.txt"), read_lock("frameworks.txt")
    assert {name: dev.get(name) for name in run} == run
    assert {name: dev.get(name, version) for name, version in frameworks.items()} == frameworks


def test_torch_is_pinned_by_its_own_line_and_brings_no_cuda_package_along() -> None:
    assert re.fullmatch(r"torch==[\d.]+\n", (ROOT / "requirements" / "torch.txt").read_text())
    locked = set(read_lock("dev.txt")) | set(read_lock("frameworks.txt"))
    assert {name for name in locked if name in {"torch", "triton"} or re.match(r"nvidia-.*-?cu|cuda-", name)} == set()


def test_what_torch_needs_is_locked() -> None:
    try:
        needs = requires("torch") or []
    except PackageNotFoundError:
        pytest.skip("torch is not installed here")
    # Needs under a marker are extras, or the CUDA packages of a CUDA build.
    assert requirement_names([need for need in needs if ";" not in need]) <= set(read_lock("run.txt"))


def test_every_declared_dependency_is_locked() -> None:
    table = project()
    extras = table["optional-dependencies"]
    assert isinstance(extras, dict)
    base = requirement_names(table["dependencies"])
    running = base | requirement_names(extras["train"]) | requirement_names(extras["nvidia"])
    assert running - {"torch"} <= set(read_lock("run.txt"))
    assert requirement_names(extras["dev"]) | requirement_names(extras["docs"]) <= set(read_lock("dev.txt"))
    assert requirement_names(extras["hf"]) | requirement_names(extras["lightning"]) <= set(read_lock("frameworks.txt"))


def test_the_base_install_has_five_dependencies() -> None:
    assert requirement_names(project()["dependencies"]) == {"msgspec", "click", "rich", "pyyaml", "xxhash"}


def test_decisions_are_numbered_without_a_gap() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "index.md")
    assert [name[:5] for name in names] == [f"{number:04d}-" for number in range(1, len(names) + 1)]


def test_a_decision_bears_its_number_in_the_title() -> None:
    for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        assert path.read_text().startswith(f"# {path.name[:4]}. "), path.name


def test_changelog_fragments_are_named_by_issue_and_kind() -> None:
    names = [path.name for path in (ROOT / "changelog.d").iterdir() if path.name not in {"README.md", ".gitignore"}]
    assert [name for name in names if not FRAGMENT.fullmatch(name)] == []


def test_only_torch_heavy_files_leave_strict_typing() -> None:
    said = re.compile(r"^# pyright: *(?:basic|standard)", re.MULTILINE)
    sources = [path for path in repository_files() if relative(path).startswith("src/") and path.suffix == ".py"]
    loose = [relative(path) for path in sources if said.search(path.read_text())]
    assert [name for name in loose if not TORCH_HEAVY.fullmatch(name)] == []


def test_every_document_is_in_the_readers_path() -> None:
    """A link of README or CONTRIBUTING to a file of the repository leads somewhere (Sphinx checks docs/)."""
    broken: list[str] = []
    for name in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
        broken += [f"{name}: {link}" for link in links if not (ROOT / link).exists()]
    assert broken == []


def test_every_target_of_the_makefile_is_explained() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))


def test_the_command_starts_without_heavy_packages() -> None:
    loaded = run_python("import sys, dougong, dougong.cli.main; print(*sys.modules)").split()
    assert {"torch", "numpy", "sqlite3", "yaml", "fsspec", "asyncio"} & set(loaded) == set()


def test_every_command_explains_itself_on_a_base_install() -> None:
    """The help of every command opens where no extra is installed."""
    code = """
import sys
for absent in ("transformers", "lightning", "torch", "numpy", "fsspec", "py_spy", "pynvml"):
    sys.modules[absent] = None
import click
from click.testing import CliRunner
import dougong.cli.main
group = next(value for value in vars(dougong.cli.main).values() if isinstance(value, click.Group))
names = group.list_commands(click.Context(group))
assert names
for name in ("", *names):
    done = CliRunner().invoke(group, [*name.split(), "--help"])
    assert done.exit_code == 0, (name, done.output, done.exception)
print("well")
"""
    assert run_python(code).strip() == "well"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
