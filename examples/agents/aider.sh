#!/bin/sh
# aider, without a repository: it reads OPENAI_API_BASE and OPENAI_API_KEY.
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["input"])')
export HOME="${PALESTRA_CASE_FILE%/*}"
cd "$HOME" && aider --model openai/any --no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable \
  --no-show-release-notes --no-gitignore --message "$question" </dev/null
