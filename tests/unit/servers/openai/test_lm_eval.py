"""lm-eval's loglikelihood tasks against our server; where lm_eval is installed (it is no dependency of ours)."""

import json

import pytest

from palestra.servers.openai.inference import inference_app, load_completer

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'lm-eval[api]'")

TASK = """task: toy_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def test_a_loglikelihood_task_gives_the_models_own_numbers_by_both_forms(serve, tmp_path):
    from lm_eval.tasks import TaskManager

    model = load_completer("palestra/tiny")
    model.tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"question": f"What is {a} + 2?", "choices": [str(a + 2), "apple"], "answer": 0} for a in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "toy.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    url, found = serve(inference_app(model)), []
    for kind, path in (("local-completions", "/v1/completions"), ("sglang-generate", "/generate")):
        server = {"model": "palestra/tiny", "base_url": url + path, "tokenizer": str(tmp_path / "tokenizer")}
        result = lm_eval.simple_evaluate(
            model=kind,
            model_args=server | {"tokenizer_backend": "huggingface", "tokenized_requests": True, "batch_size": 2},
            tasks=["toy_sums"],
            task_manager=TaskManager(include_path=str(tmp_path)),
            bootstrap_iters=0,
        )
        found.append([response[0][0] for row in result["samples"]["toy_sums"] for response in row["resps"]])
    ids = model.encode(f"{rows[0]['question']} Answer: {rows[0]['choices'][0]}")
    scored = [p for piece in model.score(ids, 1, top=0, temperature=1.0) for p in piece.logprobs]
    context = len(model.encode(f"{rows[0]['question']} Answer:"))
    assert found[0][0] == pytest.approx(sum(scored[context - 1 :]), abs=1e-3)
    assert found[0] == pytest.approx(found[1], abs=1e-3)
