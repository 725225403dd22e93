import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshper_lightning.cli import main
from freshper_lightning.retrieval import BM25Retriever, build_index, open_index

PAGES = [
    "Moon\nThe Moon orbits the Earth. It is grey.",
    '"Mars"\nMars is a red planet.',
    "Venus\nVenus is a bright planet.\nIt is hot.",
    "Pluto\nPluto was called a planet.",
    "Ümläut\nÜber 月 – nothing else.",
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("planets")
    corpus = jsonl(path / "corpus.jsonl", [{"id": i, "contents": page} for i, page in enumerate(PAGES)])
    assert build_index(corpus, path / "index") == len(PAGES)
    corpus.unlink()
    return path / "index"


def titles(folder, query, top_k=9):
    return [document.title for document in BM25Retriever(folder).search(query, top_k)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("mars", ["Mars"]),
        ("RED planet!", ["Mars", "Pluto", "Venus"]),
        ("moon moon earth", ["Moon"]),
        ("月", ["Ümläut"]),
        ("a", ["Mars", "Pluto", "Venus"]),
        ("nowhere", []),
        ("", []),
        ("?!  <search>", []),
    ],
)
def test_documents_with_words_of_the_query_are_found_best_first(folder, query, expected):
    found = titles(folder, query)
    assert sorted(found) == sorted(expected)
    assert found[:1] == expected[:1]


def test_documents_come_back_as_they_were_with_title_text_and_score(folder):
    (venus,) = BM25Retriever(folder).search("venus hot", 1)
    assert venus.contents == PAGES[2]
    assert (venus.title, venus.text) == ("Venus", "Venus is a bright planet.\nIt is hot.")
    assert venus.score > 0
    assert len(BM25Retriever(folder)) == len(PAGES)


def test_scores_are_those_of_the_formula(folder):
    """Lucene's BM25 with k1 = 1.5 and b = 0.75, written out for one word in one document."""
    (mars,) = BM25Retriever(folder).search("red", 1)
    lengths = [len([w for w in "".join(c if c.isalnum() else " " for c in page).split()]) for page in PAGES]
    idf = np.log(1 + (len(PAGES) - 1 + 0.5) / (1 + 0.5))
    norm = 1.5 * (1 - 0.75 + 0.75 * lengths[1] / np.mean(lengths))
    assert mars.score == pytest.approx(idf * 1 / (1 + norm), rel=1e-5)


def test_ties_go_to_the_document_that_comes_first(tmp_path):
    corpus = jsonl(tmp_path / "same.jsonl", [{"contents": f"Page {number}\nsame words"} for number in range(50)])
    build_index(corpus, tmp_path / "index")
    assert titles(tmp_path / "index", "same words", 7) == [f"Page {number}" for number in range(7)]


@given(st.text(max_size=60), st.integers(1, 9))
def test_any_query_is_searched_and_never_finds_more_than_asked_for(folder, query, top_k):
    found = open_index(str(folder)).search(query, top_k)
    assert len(found) <= top_k
    assert [document.score for document in found] == sorted((d.score for d in found), reverse=True)
    assert all(document.contents in PAGES for document in found)


MAPS = """
import sys
from freshper_lightning.retrieval import BM25Retriever
retriever = BM25Retriever(sys.argv[1])
print(*[document.title for document in retriever.search("red planet", 2)], flush=True)
sys.stdin.readline()
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if sys.argv[1] in line and " r--s " in line}))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are listed on Linux only")
def test_two_processes_share_one_index_by_memory_map(folder):
    start = [sys.executable, "-c", MAPS, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    readers = [subprocess.Popen(start, **pipes) for _ in range(2)]
    first = [reader.stdout.readline() for reader in readers]  # both have it open now
    maps = [reader.communicate("\n", timeout=60)[0].split() for reader in readers]
    assert first == ["Mars Pluto\n"] * 2 or first == ["Mars Venus\n"] * 2
    assert maps[0] == maps[1]
    assert {Path(path).name for path in maps[0]} >= {"data.csc.index.npy", "documents.npy", "offsets.npy"}


def test_an_index_is_opened_once_per_process(folder):
    assert open_index(str(folder)) is open_index(str(folder))


def test_equal_corpora_give_equal_answers_whatever_the_hash_seed(tmp_path):
    corpus = jsonl(tmp_path / "corpus.jsonl", [{"contents": page} for page in PAGES * 20])
    script = (
        "import sys; from freshper_lightning.retrieval import *; build_index(*sys.argv[1:3]); "
        "print([(d.contents, d.score) for d in BM25Retriever(sys.argv[2]).search('red planet earth a is', 30)])"
    )
    outputs = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script, str(corpus), str(tmp_path / seed)]
        outputs.add(subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout)
    assert len(outputs) == 1


def test_the_command_indexes_a_corpus_with_titles_apart_and_replaces_what_was_there(tmp_path, capsys):
    index = tmp_path / "index"
    for word in ("old", "new"):
        corpus = jsonl(tmp_path / "corpus.jsonl", [{"title": "One", "text": f"A {word} text."}])
        main(["index", f"--corpus={corpus}", f"--path={index}", "--text_field=text", "--title_field=title"])
    assert f"index of 1 documents in {index}" in capsys.readouterr().out
    (document,) = BM25Retriever(index).search("one", 3)
    assert (document.title, document.text) == ("One", "A new text.")
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no documents"),
        ([{"contents": "?!"}, {"contents": ""}], "has no word in its 2 documents"),
        ([{"contents": "a"}, {"text": "b"}], "row 2 has no text in field 'contents'; it has text"),
        ([{"contents": 5}], "row 1 has no text in field 'contents'"),
    ],
)
def test_a_corpus_that_cannot_serve_is_refused(tmp_path, rows, message):
    corpus = jsonl(tmp_path / "corpus.jsonl", rows)
    with pytest.raises(ValueError, match="corpus=") as refusal:
        build_index(corpus, tmp_path / "index")
    assert message in str(refusal.value)
    assert not (tmp_path / "index").exists()


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"corpus='nowhere\.jsonl' is not a file"):
        build_index("nowhere.jsonl", tmp_path / "index")
    with pytest.raises(ValueError, match="index='nowhere' is not an index; `freshper index` makes one"):
        BM25Retriever("nowhere")
    monkeypatch.setitem(sys.modules, "bm25s", None)
    corpus = jsonl(tmp_path / "corpus.jsonl", [{"contents": "a"}])
    with pytest.raises(ValueError, match=r"a BM25 index needs the package bm25s: pip install .*\[search\]"):
        build_index(corpus, tmp_path / "index")


def test_a_document_that_is_no_unicode_is_kept_as_far_as_it_is(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"contents": "Half\\ud800\\nhalf a pair"}\n')
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    assert titles(tmp_path / "index", "pair") == ["Half?"]


def test_what_cannot_be_written_to_ends_the_command_in_one_line(tmp_path):
    corpus = jsonl(tmp_path / "corpus.jsonl", [{"contents": "a"}])
    with pytest.raises(SystemExit, match=r"^freshper: error: path='.*' cannot be written"):
        main(["index", f"--corpus={corpus}", f"--path={corpus}/index"])


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["data", "data/", "made", "page.txt"])
def test_what_is_no_index_is_never_replaced(tmp_path, name):
    corpus = jsonl(tmp_path / "corpus.jsonl", [{"contents": "a"}])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("keep")
    build_index(corpus, tmp_path / "made")
    (tmp_path / "made" / "notes.txt").write_text("keep")
    (tmp_path / "page.txt").write_text("keep")
    before = files(tmp_path)
    with pytest.raises(
        ValueError, match=rf"path='.*{name}' must be a folder that is not there, is empty or holds an i"
    ):
        build_index(corpus, f"{tmp_path}/{name}")
    assert files(tmp_path) == before


def test_an_index_is_not_put_over_its_own_corpus(tmp_path):
    (tmp_path / "data" / "raw").mkdir(parents=True)
    corpus = jsonl(tmp_path / "data" / "raw" / "corpus.jsonl", [{"contents": "a"}])
    with pytest.raises(
        ValueError, match=r"corpus='.*corpus\.jsonl' must not be inside path='.*data', which is replaced"
    ):
        build_index(corpus, tmp_path / "data")
    assert corpus.exists()


@pytest.mark.parametrize("made", [False, True])
def test_the_folder_that_the_command_runs_in_is_not_replaced(tmp_path, monkeypatch, made):
    corpus = jsonl(tmp_path / "corpus.jsonl", [{"contents": "a"}])
    (tmp_path / "here").mkdir()
    if made:
        build_index(corpus, tmp_path / "here")
    before = files(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", ""):
        with pytest.raises(ValueError, match="and not one that the command runs in"):
            build_index(corpus, path)
    assert files(tmp_path) == before


def test_an_empty_folder_a_slash_at_the_end_and_a_link_are_as_good_as_a_name(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "link").symlink_to("index")
    for number, path in enumerate(("index/", "index/", "link", "new/index/"), start=1):
        corpus = jsonl(tmp_path / "corpus.jsonl", [{"contents": f"Page {number}"}])
        build_index(corpus, f"{tmp_path}/{path}")
        assert titles(tmp_path / path, "page") == [f"Page {number}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index", "link", "new"]
    assert (tmp_path / "link").is_symlink()


def test_the_old_index_stays_where_a_new_one_fails(tmp_path):
    build_index(jsonl(tmp_path / "corpus.jsonl", [{"contents": "Old"}]), tmp_path / "index")
    with pytest.raises(ValueError, match="no word"):
        build_index(jsonl(tmp_path / "corpus.jsonl", [{"contents": "?"}]), tmp_path / "index")
    assert titles(tmp_path / "index", "old") == ["Old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]
