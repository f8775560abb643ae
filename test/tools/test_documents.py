"""Tests the documents: they are short, name every file, and name no file that is not there."""
import ast
import fnmatch
import os
import pathlib
import re
import subprocess

import pytest

from program import ROOT

pytestmark = pytest.mark.quick

FILES = [pathlib.PurePath(name) for name in subprocess.run(
    ["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False).stdout.splitlines()
         if (ROOT / name).exists()]
if not FILES:
    pytest.skip("this is no clone of the repository: git lists no files", allow_module_level=True)
# Folders of inputs and reference values. test/README.md describes them.
DATA = ("test/corpus/", "test/goldens/")
FOLDERS = sorted({str(path.parent) for path in FILES if not str(path).startswith((".", *DATA))
                  and path.parent != pathlib.PurePath(".")})
DOCUMENTS = [path for path in FILES if path.suffix == ".md"]
ARCHITECTURE = pathlib.PurePath("dev/ARCHITECTURE.md")
MOST_WORDS = 27000


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_readme_is_read_in_ten_minutes():
    text = read("README.md")
    assert len(text.splitlines()) <= 180 and len(text.split()) <= 2000
    assert "make quickstart" in text and "make test" in text


def test_one_reads_them_all_in_an_afternoon():
    """A document that grows makes another one shorter."""
    words = {str(path): len(read(path).split()) for path in DOCUMENTS}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])


def sections(text):
    """The sections of ARCHITECTURE.md about a folder, by the folder's name."""
    parts = re.split(r"^#{2,3} (.*)\n", text, flags=re.MULTILINE)
    return {title: body for title, body in zip(parts[1::2], parts[2::2]) if title in FOLDERS}


def says_what_it_tests(path):
    """The file begins with a sentence about it: a docstring, or a comment before all code."""
    text = read(path)
    if path.suffix == ".py":
        return len((ast.get_docstring(ast.parse(text)) or "").split()) >= 4
    head = re.match(r"/\*(.*?)\*/", text, re.DOTALL)
    return head is not None and len(head[1].split()) >= 6


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_of_a_folder_are_named(folder):
    """In its README, or in its section of ARCHITECTURE.md. The head of a test says what it tests."""
    readme = pathlib.PurePath(folder, "README.md")
    text = sections(read(ARCHITECTURE)).get(folder, "")
    if readme in FILES:
        assert len(read(readme).splitlines()) <= 66, "more than a page: move results to a document of their own"
        text += read(readme)
    words = {word.split(".")[0] for word in re.findall(r"[\w*-]+(?:\.[\w*]+)?", text) if re.search(r"\w\w", word)}
    for path in FILES:
        if str(path.parent) != folder or path.suffix in (".md", ".png", ".csv", ".jsonl"):
            continue
        if folder.startswith("test/") and path.stem.startswith("test_") and path.suffix in (".py", ".c"):
            assert says_what_it_tests(path), f"the head of {path} does not say what it tests"
            continue
        assert any(fnmatch.fnmatch(path.stem, word) for word in words), \
            f"{path.name}: neither {readme} nor the section {folder} of {ARCHITECTURE} names it"


def test_the_parts_of_the_architecture_are_there():
    """Each file and function that a walk names exists, and each section is about a folder that there is."""
    text = read(ARCHITECTURE)
    titles = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert titles and set(titles) <= set(FOLDERS), set(titles) - set(FOLDERS)
    rows = re.findall(r"^[0-9]+\. (.*?):\s", text, re.MULTILINE)  # of the walks
    assert len(rows) > 20
    here = ""
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row):
            if "." in name:
                (here,) = [path for path in (name, f"llmc/{name}", f"lossynet/{name}") if (ROOT / path).exists()]
            else:
                assert re.search(rf"^\w[^;]*\b{name}\(", read(here), re.MULTILINE), f"{here} has no {name}"


def test_a_script_can_be_called_as_documents_call_it():
    scripts = [str(path) for path in FILES if (ROOT / path).is_file() and (ROOT / path).read_bytes()[:2] == b"#!"]
    assert len(scripts) > 40
    assert not [name for name in scripts if not os.access(ROOT / name, os.X_OK)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_what_a_document_names_is_there(document):
    text = read(document)
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert (ROOT / document.parent / link).exists(), link
    for path in re.findall(r"`((?:data|dev|llmc|lossynet|scripts|test)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
    for link, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", text):
        if not link.startswith("http"):
            target = os.path.normpath(document.parent / link) if link else document
            titles = re.findall(r"^#+ (.*)$", read(target), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{link}#{anchor}"


MEASURED = re.compile(r"(?<![\w.-])\d+(?:[.,]\d+)?(?:%| ?(?:ms|s|[KMGT]i?B|tokens/s|Gbit/s|minutes?|hours?)\b)")
# A year, a command in code, a block of commands, or a file of results.
SOURCE = re.compile(r"\b20\d\d\b|`[^`]*(?:make |build/|scripts/|dev/|test/|\.py|\.sh|--)[^`]*`|^```sh|^ {4}\S*(?:build|dev)/|\.jsonl",
                    re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_figures_have_a_source(document):
    """A section with figures names the command that prints them, what keeps them, or when they were measured."""
    titles_and_bodies = re.split(r"^(#+ .*)$", read(document), flags=re.MULTILINE)
    for title, body in zip(titles_and_bodies[1::2], titles_and_bodies[2::2]):
        assert len(MEASURED.findall(body)) < 2 or SOURCE.search(body), f"{title}: whence {MEASURED.findall(body)}?"
