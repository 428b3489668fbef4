"""A Vision Transformer and both ways of attention transfer written the long way, from matrices: what atlib is compared with.

Nothing of atlib and nothing of timm is used: weights come as a plain dict in timm's names, heads are a loop, maps are explicit.
"""

import math

import torch


def layer_norm(x, weight, bias, eps=1e-6):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def softmax(scores):
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def embed(w, images, patch):
    """Patches in reading order, one product each; then the class token in front, if there is one, and positions."""
    rows = []
    for top in range(0, images.shape[2], patch):
        for left in range(0, images.shape[3], patch):
            pixels = images[:, :, top : top + patch, left : left + patch].flatten(1)
            rows.append(pixels @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"])
    tokens = torch.stack(rows, 1)
    if "cls_token" in w:
        tokens = torch.cat([w["cls_token"].expand(len(images), 1, -1), tokens], 1)
    return tokens + w["pos_embed"]


def run_blocks(w, x, heads, maps=None, queries=None, masks=None, prefix="blocks"):
    """Tokens (B, N, D) through all blocks of that prefix: tokens, and every layer's own map (B, H, N, N) and query (B, H, N, d).

    `maps` and `queries` {layer: ...} are used instead of the layer's own; its own are then not returned (None).
    `masks` {(layer, branch): (B,)}: factors on the attention (0) and the MLP (1) branch.
    """
    depth = len([name for name in w if name.startswith(prefix) and name.endswith("attn.qkv.weight")])
    own_maps, own_queries = [], []
    for layer in range(depth):
        start = f"{prefix}.{layer}."
        part = {name.removeprefix(start): value for name, value in w.items() if name.startswith(start)}
        y = layer_norm(x, part["norm1.weight"], part["norm1.bias"])
        width = y.shape[-1]
        d = width // heads
        outputs, seen_maps, seen_queries = [], [], []
        for head in range(heads):

            def project(row):
                rows = slice(row * width + head * d, row * width + (head + 1) * d)
                return y @ part["attn.qkv.weight"][rows].T + part["attn.qkv.bias"][rows]

            if maps is not None and layer in maps:
                p = maps[layer][:, head]
            else:
                q = project(0) if queries is None or layer not in queries else queries[layer][:, head]
                p = softmax(torch.einsum("bid,bjd->bij", q, project(1)) / math.sqrt(d))
                seen_maps.append(p)
                seen_queries.append(q)
            outputs.append(torch.einsum("bij,bjd->bid", p, project(2)))
        routed = torch.cat(outputs, -1) @ part["attn.proj.weight"].T + part["attn.proj.bias"]
        x = x + factor(masks, layer, 0) * routed
        y = layer_norm(x, part["norm2.weight"], part["norm2.bias"])
        y = gelu(y @ part["mlp.fc1.weight"].T + part["mlp.fc1.bias"]) @ part["mlp.fc2.weight"].T + part["mlp.fc2.bias"]
        x = x + factor(masks, layer, 1) * y
        own_maps.append(torch.stack(seen_maps, 1) if seen_maps else None)
        own_queries.append(torch.stack(seen_queries, 1) if seen_queries else None)
    return x, own_maps, own_queries


def vit(w, images, heads, patch=8, **instead):
    """Logits (B, classes) and every layer's own map and query; `instead` is what `run_blocks` takes."""
    x, maps, queries = run_blocks(w, embed(w, images, patch), heads, **instead)
    if "fc_norm.weight" in w:  # average pooling over all patches, then the norm
        pooled = layer_norm(x[:, 1 if "cls_token" in w else 0 :].mean(1), w["fc_norm.weight"], w["fc_norm.bias"])
    else:  # the class token
        pooled = layer_norm(x, w["norm.weight"], w["norm.bias"])[:, 0]
    return pooled @ w["head.weight"].T + w["head.bias"], maps, queries


def factor(masks, layer, branch):
    return 1.0 if masks is None else masks[layer, branch][:, None, None]


def cross_entropy(logits, labels):
    return -torch.stack([(row - row.logsumexp(0))[label] for row, label in zip(logits, labels)]).mean()


def map_loss(student_maps, teacher_maps):
    """-Σ_keys p_t log p_s, mean over batch, heads, queries, summed over layers."""
    return sum(-torch.einsum("bhij,bhij->bhi", p_t, p_s.log()).mean() for p_s, p_t in zip(student_maps, teacher_maps, strict=True))


def transfer(teacher, student, images, heads, how, layers, masks=None, teacher_masks=None):
    """One teacher-student step from two dicts of weights: the student's logits and the transfer loss."""
    with torch.no_grad():
        maps = vit(teacher, images, heads, masks=teacher_masks)[1]
    if how == "copy":
        logits = vit(student, images, heads, maps={layer: maps[layer] for layer in layers}, masks=masks)[0]
        return logits, torch.zeros(())
    logits, own, _ = vit(student, images, heads, masks=masks)
    return logits, map_loss([own[layer] for layer in layers], [maps[layer] for layer in layers])
