#!/bin/sh
# Qwen Code. It reads OPENAI_BASE_URL and OPENAI_API_KEY; --bare leaves out what it would look for on this machine.
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["input"])')
export HOME="${PALESTRA_CASE_FILE%/*}" OPENAI_MODEL=any
mkdir "$HOME/.qwen" && echo '{"privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false}}' >"$HOME/.qwen/settings.json"
cd "$HOME" && qwen --bare --auth-type openai -p "$question" </dev/null
