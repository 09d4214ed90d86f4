"""A rank that trains nothing: loads the loader's state through DCP, takes steps, saves it.

Run by torchrun with a JSON object of arguments. The mesh has ``tp`` ranks in each data-parallel
group; that these peers get identical batches is checked here.
"""

import hashlib
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from torchtitan_zephon.recipe import parse_recipe
from torchtitan_zephon.titan.loader import ZephonDataLoader


def main(arguments: dict) -> None:
    """Take ``steps`` steps, from the checkpoint ``load`` if there is one, then save to ``save``."""
    dist.init_process_group("gloo")
    dp = dist.get_world_size() // arguments["tp"]
    mesh = init_device_mesh("cpu", (dp, arguments["tp"]), mesh_dim_names=("batch", "tp"))
    config = ZephonDataLoader.Config(
        recipe=parse_recipe(arguments["table"], seq_len=16, tokenizer_path=arguments["tokenizer"]),
        global_batch_size=arguments["batch"],
        dump_folder=arguments["dump_folder"],
    )
    loader = config.build(
        dp_world_size=dp,
        dp_rank=mesh["batch"].get_local_rank(),
        tokenizer=None,
        seq_len=16,
        local_batch_size=1,
    )
    if arguments.get("load"):
        dcp.load({"dataloader": loader}, checkpoint_id=arguments["load"])
    for _ in range(arguments["steps"] * arguments["batch"] // dp):
        batch, labels = next(loader)
        seen = hashlib.sha256()
        for tensor in (batch["input"], batch["positions"], labels):
            seen.update(tensor.numpy().tobytes())
        mine = torch.frombuffer(bytearray(seen.digest()), dtype=torch.uint8)
        peers = [torch.empty_like(mine) for _ in range(arguments["tp"])]
        dist.all_gather(peers, mine, group=mesh["tp"].get_group())
        assert all(torch.equal(peer, mine) for peer in peers)
    if arguments.get("save"):
        dcp.save({"dataloader": loader}, checkpoint_id=arguments["save"])
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
