#!/bin/sh
# mini-swe-agent, through litellm: it reads OPENAI_API_BASE and OPENAI_API_KEY.
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["input"])')
export LITELLM_LOCAL_MODEL_COST_MAP=True  # no download of prices
export HOME="${PALESTRA_CASE_FILE%/*}" MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
cd "$HOME" && mini --model openai/any --task "$question" --yolo --exit-immediately </dev/null
