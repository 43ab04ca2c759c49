#!/usr/bin/env bash
# Makes examples/plan.png, the upper part of a plan's page, and examples/lab.png, the lab. It needs Chromium (or Chrome:
# CHROMIUM=google-chrome).
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT

picture() { # file, size, address
    "${CHROMIUM:-chromium}" --headless --no-sandbox --hide-scrollbars --user-data-dir="$folder/profile" \
        --virtual-time-budget=30000 --window-size="$2" --screenshot="$1" "$3" 2>/dev/null
}

meshpar plan examples/llama.py:llama3_8b --topology v5p:4x4x8 --mesh "data=32, model=4" \
    --layout "batch: data; heads, kv_heads?, mlp, vocab: model; embed: data; seq: model" --html "$folder/plan.html" >/dev/null
picture examples/plan.png 1100,1190 "file://$folder/plan.html"

meshpar lab examples/llama.py:llama3_8b --topology v5e:16x16 --set "batch=32" --mesh "data=32, model=8" \
    --layout fsdp+tensor+sequence --no-browser >"$folder/url" 2>/dev/null &
server=$!
until [ -s "$folder/url" ]; do sleep 0.2; kill -0 "$server"; done
picture examples/lab.png 1400,1000 "$(cat "$folder/url")"
