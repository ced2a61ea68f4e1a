#!/bin/sh
# Claude Code. Its files go to the attempt's folder; the model is at ANTHROPIC_BASE_URL.
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["input"])')
export HOME="${PALESTRA_CASE_FILE%/*}" DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
cd "$HOME" && claude -p "$question" </dev/null
