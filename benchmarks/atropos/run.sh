#!/usr/bin/env bash
# Unmodified atroposlib environments train the embedded model end to end, in each of their three ways of sampling.
#   benchmarks/atropos/run.sh > benchmarks/atropos/RESULTS.txt
# sampler_gap_max is the largest |learner's - inference server's| logprob over all tokens of a step. In the
# last run nothing is learned, so that every token of every step was sampled by the very weights that score it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d) && cd "$work"
small=(--model.name palestra/tiny --train.max_steps 5 --rollout.group_size 4 --train.problems_per_step 2)
train() {
    echo "== $1"; shift
    palestra env run-atropos "$here/digits_env.py" "${small[@]}" "$@" --json 2>run.log | tail -1 || { cat run.log; exit 1; }
    run=$(ls -td runs/* | head -1)
    python - "$run/metrics.jsonl" <<'PY'
import json, sys
for row in map(json.loads, open(sys.argv[1])):
    shown = ("step", "reward_mean", "loss", "tokens_trained", "ratio_max", "sampler_gap_max")
    print({name: round(row[name], 7) for name in shown if name in row})
PY
}
train "one turn, managed server, sglang" --openai.server_type sglang
train "one turn, managed server, vllm" --openai.server_type vllm
train "two turns, chat, openai" --openai.server_type openai --env.turns 2
train "one turn, sglang, nothing learned" --openai.server_type sglang --train.learning_rate 1e-12
