import json

import pytest

from palestra.core.errors import PalestraError
from palestra.core.types import Message, Problem
from palestra.evals.suite import EvalSuite, hold_out

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


def test_input_and_expect_are_the_default_keys():
    assert EvalSuite.from_records([{"input": "hi", "expect": "ho"}]).cases[0].expect == "ho"
    assert EvalSuite.from_records([{"input": "hi"}]).cases[0].expect is None


def test_an_input_may_be_messages():
    suite = EvalSuite.from_records([{"input": [{"role": "user", "content": "hi"}]}])
    assert suite.cases[0].input == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "has no cases"),
        ([{"question": "x"}], r"record 0 has no 'input'; its keys are question.*input_fn=lambda"),
        (["text"], "record 0 is of type str"),
        ([{"input": 3}], "input_fn gave 3"),
        ([{"input": []}], r"input_fn gave \[\]"),
    ],
    ids=str,
)
def test_bad_records_are_refused_with_the_remedy(records, words):
    with pytest.raises(PalestraError, match=words):
        EvalSuite.from_records(records)


def test_a_wrong_key_in_expect_fn_is_named():
    with pytest.raises(PalestraError, match=r"record 0 has no 'anwser'.*expect_fn"):
        EvalSuite.from_records(RECORDS, question, lambda record: record["anwser"])


def test_two_cases_of_one_id_are_refused():
    with pytest.raises(PalestraError, match="two cases of the suite 'suite' have the id 'a'"):
        EvalSuite([Problem("a", "x"), Problem("a", "y")])


def test_an_unknown_measure_is_refused_at_once():
    with pytest.raises(PalestraError, match="no measure 'nobody_declared_this'"):
        EvalSuite.from_records([{"input": "x"}], measures=["nobody_declared_this"])


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


def test_line_breaks_inside_of_json_text_or_csv_quotes_do_not_split_a_record(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert EvalSuite.from_jsonl(tmp_path / "a.jsonl").cases[0].input == "a\u2028b"
    (tmp_path / "a.csv").write_text('input,expect\n"a\nb\u2028",c\n', encoding="utf-8")
    assert EvalSuite.from_csv(tmp_path / "a.csv").cases[0].input == "a\nb\u2028"


def test_a_dataset_object_gives_its_rows():
    datasets = pytest.importorskip("datasets")
    suite = EvalSuite.from_hf_dataset(datasets.Dataset.from_list(RECORDS), question, expect_fn=answer)
    assert [case.input for case in suite] == [record["question"] for record in RECORDS]


@pytest.mark.parametrize("reader", [EvalSuite.from_jsonl, EvalSuite.from_csv, EvalSuite.from_parquet])
def test_a_missing_file_is_named(reader, tmp_path):
    with pytest.raises(PalestraError, match=r"there is no file .*nowhere"):
        reader(tmp_path / "nowhere")


def test_a_broken_line_is_named_by_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "x"}\n{broken\n')
    with pytest.raises(PalestraError, match="line 2 is not JSON"):
        EvalSuite.from_jsonl(tmp_path / "a.jsonl")


def test_a_split_is_whole_disjoint_and_repeatable():
    suite = EvalSuite.from_records(RECORDS, question, answer, [right])
    train, held_out = suite.split(0.3, seed=1)
    assert (len(train), len(held_out)) == (7, 3)
    assert {case.id for case in train} | {case.id for case in held_out} == {case.id for case in suite}
    assert suite.split(0.3, seed=1) == (train, held_out)
    assert suite.split(0.3, seed=2) != (train, held_out)
    assert held_out.measures == suite.measures


def test_even_a_small_suite_keeps_a_case_on_either_side():
    two = EvalSuite.from_records(RECORDS[:2], question)
    assert [len(part) for part in two.split(0.01)] == [1, 1]
    assert [len(part) for part in two.split(0.99)] == [1, 1]


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, 5])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(PalestraError, match="held_out"):
        EvalSuite.from_records(RECORDS, question).split(share)


def test_one_case_cannot_be_split():
    with pytest.raises(PalestraError, match="one case"):
        EvalSuite.from_records(RECORDS[:1], question).split()


@pytest.mark.parametrize("share", [0, 0.0, None])
def test_with_nothing_held_out_all_cases_are_trained_on(share):
    suite = EvalSuite.from_records([{"input": str(i)} for i in range(5)])
    assert hold_out(suite, share) == (suite, None)


def test_a_suite_of_one_case_is_trained_on_whole():
    suite = EvalSuite.from_records([{"input": "0"}])
    assert hold_out(suite, 0.2) == (suite, None)


def test_a_share_or_a_suite_is_held_out_and_all_else_is_refused():
    suite = EvalSuite.from_records([{"input": str(i)} for i in range(5)])
    assert [len(part) for part in hold_out(suite, 0.4)] == [3, 2]
    other = EvalSuite.from_records([{"input": "x"}], name="other")
    assert hold_out(suite, other) == (suite, other)
    assert hold_out(suite, suite) == (suite, suite)
    with pytest.raises(PalestraError, match="held_out is a str; expected an EvalSuite, a share, or 0 for none"):
        hold_out(suite, "half")
    with pytest.raises(PalestraError, match=r"held_out=1\.5"):
        hold_out(suite, 1.5)


def test_a_held_out_case_never_has_the_id_of_another_training_case_and_keeps_its_seed():
    suite, other = (EvalSuite.from_records([{"input": text}, {"input": "0"}]) for text in "ab")
    trained, held_out = hold_out(suite, other)
    assert held_out is not None
    assert not {case.id for case in trained} & {case.id for case in held_out}
    assert [case.own_id for case in held_out] == [case.id for case in other]


def test_records_in_the_place_of_a_suite_are_answered_with_how_to_make_one():
    with pytest.raises(PalestraError, match=r"the suite is a list; make one of it: EvalSuite\.from_records\(rows"):
        hold_out([{"input": "1"}], 0.2)


@pytest.mark.parametrize("read", [EvalSuite.from_jsonl, EvalSuite.from_csv])
def test_a_file_that_is_no_utf8_text_or_no_file_is_named(read, tmp_path):
    path = tmp_path / "cases.txt"
    path.write_text("input\nÄpfel\n", encoding="latin-1")
    with pytest.raises(PalestraError, match=r"cases\.txt is not UTF-8 text \(byte 0xc4 at 6\); save it as UTF-8"):
        read(path)
    with pytest.raises(PalestraError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_a_csv_row_with_a_bare_comma_is_refused_and_not_shifted_into_other_columns(tmp_path):
    path = tmp_path / "cases.csv"
    path.write_text('input,expect\n"one,\ntwo",2\nWhat do a mug, and a lamp cost?,12\n')
    with pytest.raises(PalestraError, match=r"cases\.csv, line 4 has more values than the header has columns \(2\)"):
        EvalSuite.from_csv(path)
    path.write_text("input,input\na,b\n")
    with pytest.raises(PalestraError, match="two columns 'input'; rename one"):
        EvalSuite.from_csv(path)


def test_a_csv_field_may_be_a_long_document(tmp_path):
    path = tmp_path / "cases.csv"
    path.write_text(f"input,expect\n{'x' * 200_000},1\n")
    assert len(EvalSuite.from_csv(path).cases[0].input) == 200_000


def test_a_message_that_is_none_is_refused_with_its_record():
    good, bad = [{"role": "user", "content": "x"}], [{"role": "usr", "content": "x"}]
    with pytest.raises(PalestraError, match="record 1: a message has the role 'usr'"):
        EvalSuite.from_records([{"input": good}, {"input": bad}])


def test_of_a_dataset_with_several_splits_one_is_taken():
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([{"input": "a"}]), "test": datasets.Dataset.from_list([{"input": "b"}])}
    )
    assert EvalSuite.from_hf_dataset(both).cases[0].input == "a"
    assert EvalSuite.from_hf_dataset(both, split="test").cases[0].input == "b"
    with pytest.raises(PalestraError, match="no split 'dev'; it has train, test"):
        EvalSuite.from_hf_dataset(both, split="dev")


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "cases.parquet"
    path.write_text("input\n")
    with pytest.raises(PalestraError, match=r"cases\.parquet cannot be read as Parquet"):
        EvalSuite.from_parquet(path)
