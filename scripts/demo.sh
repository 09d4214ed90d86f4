#!/usr/bin/env bash
# Trains a small model twice on CPU, once without a stop on 2 ranks, once stopped and resumed on
# 2, 4, 1 and 3 ranks, and compares the SHA-256 of what each optimizer step was fed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=outputs/demo
steps=24
export OMP_NUM_THREADS=1

# train NAME FOLDER RANKS LOCAL_BATCH_SIZE LAST_STEP: one torchrun, its output in $out/logs/NAME.log
train() {
    local name=$1 folder=$2 ranks=$3 local_batch_size=$4 last_step=$5
    local log=$out/logs/$name.log begin=$SECONDS
    printf '%-12s %s rank(s), local batch %2s, until step %2s ... ' \
        "$folder" "$ranks" "$local_batch_size" "$last_step"
    # --standalone takes a free port. The last checkpoint of each run is a full one, to go on from.
    if ! .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        -m torchtitan_zephon.train --config_file train_configs/debug_cpu.toml \
        --dump_folder "$out/$folder" --checkpoint.interval 6 \
        --training.local_batch_size "$local_batch_size" --training.steps "$last_step" \
        >"$log" 2>&1; then
        echo "FAILED; the end of $log:"
        tail -n 40 "$log"
        exit 1
    fi
    echo "$((SECONDS - begin)) s"
}

scripts/setup.sh
rm -rf "$out/reference" "$out/resumed" "$out/logs"
mkdir -p "$out/logs"
.venv/bin/python scripts/prepare_demo_data.py "$out"

# Another number of ranks and another microbatch size each time: neither may change a byte.
train reference reference 2 3 "$steps"
train resumed-1 resumed 2 2 6
train resumed-2 resumed 4 3 12
train resumed-3 resumed 1 12 18
train resumed-4 resumed 3 1 "$steps"

.venv/bin/python scripts/demo_table.py "$out" "$steps"
