"""The plan of a pipeline in words."""

from torchtitan_zephon.pipeline import Pipeline


def explain(pipeline: Pipeline, batch: int, ranks: tuple[int, int]) -> str:
    """The plan of an opened pipeline, one line for each step."""
    recipe, lanes = pipeline.recipe, pipeline.lanes
    threads = recipe.runtime.threads
    alone = threads == 1 or recipe.runtime.runner == "inline"
    where = "the producer thread" if alone else f"{threads} threads"
    kept, handed_out = 4 * recipe.seq_len, 3 * 8 * recipe.seq_len  # bytes of a row
    lines = [
        f"pipeline {pipeline.fingerprint[:12]}: {lanes} lanes, global batch {batch}, "
        f"rank {ranks[0]} of {ranks[1]}"
    ]
    for dataset, config in zip(pipeline.datasets, recipe.datasets, strict=True):
        lines.append(
            f"  read      worker       {dataset.name}: {len(dataset.shards)} {dataset.format} "
            f"shards, {dataset.bytes:,} bytes in {dataset.num_chunks:,} chunks of up to "
            f"{dataset.chunk_bytes:,}, weight {config.weight:g}; in {where}"
        )
    for function in pipeline.functions:
        place = f"{threads} processes" if recipe.runtime.runner == "processes" else where
        only = f" of {', '.join(function.datasets)}" if function.datasets else ""
        lines.append(f"  {function.kind:<9} worker       {function.name}{only}; in {place}")
    lines.append(
        f"  tokenize  worker       {recipe.tokenizer.path} through {pipeline.tokenizer.backend}, "
        f"{pipeline.tokenizer.vocab_size:,} ids; in {where}"
    )
    source = recipe.work_source
    what = "token shares by weight" if source == "weights" else source
    lines.append(f"  mix       accumulator  {what}, in {len(pipeline.phases)} phase(s)")
    packing = recipe.packing
    bins = (
        "" if packing.algorithm in ("wrap", "none") else f", {packing.open_bins} open rows a lane"
    )
    lines.append(
        f"  pack      accumulator  {packing.algorithm} into rows of {recipe.seq_len}{bins}"
    )
    lines.append(
        f"  shuffle   accumulator  {pipeline.shuffled_rows} rows of a lane among each other, in "
        f"segments of {pipeline.segment_rows} rows, "
        f"{pipeline.segment_rows * kept:,} bytes a lane, {lanes * pipeline.segment_rows * kept:,} "
        "for all lanes"
    )
    share = batch // ranks[1]
    lines.append(
        f"  batch     accumulator  {share} rows a step on this rank, "
        f"{recipe.runtime.prefetch_steps} steps ahead, "
        f"{(recipe.runtime.prefetch_steps + 1) * share * handed_out:,} bytes"
    )
    return "\n".join(lines)
