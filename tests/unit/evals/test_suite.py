import json

import pytest

from palestra.core.errors import NotFoundError, PalestraError
from palestra.core.types import Message, Problem
from palestra.evals.suite import EvalSuite, hold_out

GOOD, BAD = [{"role": "user", "content": "x"}], [{"role": "usr", "content": "x"}]
RECORDS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(10)]


def right(ctx):
    return ctx.expect in ctx.final_assistant_message.text


def question(record):
    return record["question"]


def answer(record):
    return record["answer"]


def test_records_become_cases_with_their_whole_row():
    suite = EvalSuite.from_records(RECORDS, question, answer, [right], name="sums")
    assert len(suite) == 10
    assert next(iter(suite)) == Problem("sums-0", "0 + 1?", "1", RECORDS[0])
    assert [m.name for m in suite.measures] == ["right"]
    default = EvalSuite.from_records([{"input": "hi", "expect": "ho"}, {"input": GOOD}])
    assert [case.expect for case in default] == ["ho", None]
    assert default.cases[1].input == (Message("user", "x"),)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EvalSuite.from_records([]), "no cases"),
        (lambda: EvalSuite.from_records([{"question": "x"}]), r"record 0 .*'input'.*question.*input_fn=lambda"),
        (lambda: EvalSuite.from_records(["text"]), "record 0 .* str"),
        (lambda: EvalSuite.from_records([{"input": 3}]), "input_fn gave 3"),
        (lambda: EvalSuite.from_records([{"input": []}]), r"input_fn gave \[\]"),
        (lambda: EvalSuite.from_records([{"input": GOOD}, {"input": BAD}]), "record 1: .*'usr'"),
        (lambda: EvalSuite.from_records(RECORDS, question, lambda r: r["anwser"]), r"record 0 .*'anwser'.*expect_fn"),
        (lambda: EvalSuite([Problem("a", "x"), Problem("a", "y")]), "id 'a'"),
        (lambda: EvalSuite.from_records([{"input": "x"}], measures=["not_declared"]), "no measure 'not_declared'"),
        (lambda: EvalSuite.from_records(RECORDS[:1], question).split(), "one case"),
        *((lambda x=x: EvalSuite.from_records(RECORDS, question).split(x), "held_out") for x in (0.0, 1.0, -1.0, 5)),
        (lambda: hold_out([{"input": "1"}], 0.2), r"EvalSuite\.from_records\(rows"),
        (lambda: hold_out(EvalSuite.from_records(RECORDS, question), "half"), "held_out is a str"),
        (lambda: hold_out(EvalSuite.from_records(RECORDS, question), 1.5), r"held_out=1\.5"),
    ],
)
def test_what_makes_no_suite_is_refused_with_what_to_change(make, words):
    with pytest.raises(PalestraError, match=words):
        make()


def test_jsonl_csv_and_parquet_give_the_same_suite(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "sums.jsonl").write_text("\n\n".join(json.dumps(record) for record in RECORDS))
    lines = ["question,answer", *(f"{r['question']},{r['answer']}" for r in RECORDS)]
    (tmp_path / "sums.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "sums.parquet")
    expected = EvalSuite.from_records(RECORDS, question, answer, [right], name="sums")
    options = {"input_fn": question, "expect_fn": answer, "measures": [right]}
    assert EvalSuite.from_jsonl(tmp_path / "sums.jsonl", **options) == expected
    assert EvalSuite.from_csv(tmp_path / "sums.csv", **options) == expected
    assert EvalSuite.from_parquet(tmp_path / "sums.parquet", **options) == expected


def test_line_breaks_inside_of_json_text_or_csv_quotes_do_not_split_a_record_and_a_field_may_be_long(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert EvalSuite.from_jsonl(tmp_path / "a.jsonl").cases[0].input == "a\u2028b"
    (tmp_path / "a.csv").write_text('input,expect\n"a\nb\u2028",c\n', encoding="utf-8")
    assert EvalSuite.from_csv(tmp_path / "a.csv").cases[0].input == "a\nb\u2028"
    (tmp_path / "a.csv").write_text(f"input,expect\n{'x' * 200_000},1\n")
    assert len(EvalSuite.from_csv(tmp_path / "a.csv").cases[0].input) == 200_000


def test_half_an_emoji_in_a_case_is_replaced_so_that_programs_can_read_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "\\ud83d lamp", "expect": ["\\ud83d"], "\\ude00": "\\ud83d"}\n')
    (case,) = EvalSuite.from_jsonl(tmp_path / "a.jsonl").cases
    assert (case.input, case.expect, case.row["?"]) == ("? lamp", ["?"], "?")


def test_a_split_is_whole_disjoint_and_repeatable():
    suite = EvalSuite.from_records(RECORDS, question, answer, [right])
    train, held_out = suite.split(0.3, seed=1)
    assert (len(train), len(held_out)) == (7, 3)
    assert {case.id for case in train} | {case.id for case in held_out} == {case.id for case in suite}
    assert suite.split(0.3, seed=1) == (train, held_out)
    assert suite.split(0.3, seed=2) != (train, held_out)
    assert held_out.measures == suite.measures
    two = EvalSuite.from_records(RECORDS[:2], question)
    assert [len(part) for part in two.split(0.01)] == [1, 1]
    assert [len(part) for part in two.split(0.99)] == [1, 1]


def test_a_share_or_a_suite_or_nothing_is_held_out():
    suite = EvalSuite.from_records([{"input": str(i)} for i in range(5)])
    assert all(hold_out(suite, share) == (suite, None) for share in (0, 0.0, None))
    one = EvalSuite.from_records([{"input": "0"}])
    assert hold_out(one, 0.2) == (one, None), "a suite of one case is trained on whole"
    assert [len(part) for part in hold_out(suite, 0.4)] == [3, 2]
    other = EvalSuite.from_records([{"input": "x"}], name="other")
    assert hold_out(suite, other) == (suite, other)
    assert hold_out(suite, suite) == (suite, suite)


def test_a_held_out_case_never_has_the_id_of_another_training_case_and_keeps_its_seed():
    suite, other = (EvalSuite.from_records([{"input": text}, {"input": "0"}]) for text in "ab")
    trained, held_out = hold_out(suite, other)
    assert held_out is not None
    assert not {case.id for case in trained} & {case.id for case in held_out}
    assert [case.own_id for case in held_out] == [case.id for case in other]


def test_a_dataset_gives_its_rows_and_of_several_splits_one_is_taken():
    datasets = pytest.importorskip("datasets")
    suite = EvalSuite.from_hf_dataset(datasets.Dataset.from_list(RECORDS), question, expect_fn=answer)
    assert [case.input for case in suite] == [record["question"] for record in RECORDS]
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([{"input": "a"}]), "test": datasets.Dataset.from_list([{"input": "b"}])}
    )
    assert EvalSuite.from_hf_dataset(both).cases[0].input == "a"
    assert EvalSuite.from_hf_dataset(both, split="test").cases[0].input == "b"
    with pytest.raises(NotFoundError, match="no split 'dev'; it has train, test"):
        EvalSuite.from_hf_dataset(both, split="dev")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"input": "x"}\n{broken\n', "line 2"),
        ("a.jsonl", "input\nÄpfel\n".encode("latin-1"), r"not UTF-8 text \(byte 0xc4 at 6\)"),
        ("a.csv", "input\nÄpfel\n".encode("latin-1"), r"not UTF-8 text \(byte 0xc4 at 6\)"),
        ("a.csv", 'input,expect\n"one,\ntwo",2\nA mug, and a lamp?,12\n', r"a\.csv, line 4 .*columns \(2\)"),
        ("a.csv", "input,input\na,b\n", "two columns 'input'"),
        ("a.parquet", "input\n", r"a\.parquet cannot be read as Parquet"),
        *((f"a.{kind}", None, r"no file .*a\.") for kind in ("jsonl", "csv", "parquet")),
        *((f"a.{kind}", "folder", "Is a directory") for kind in ("jsonl", "csv")),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, words):
    pytest.importorskip("pyarrow")
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PalestraError, match=words):
        getattr(EvalSuite, f"from_{path.suffix[1:]}")(path)
