"""A Vision Transformer and both ways of attention transfer written the long way, from matrices: what atlib is
compared with.

Nothing of atlib and nothing of timm is used: weights come as a plain dict in timm's names, heads are a loop,
maps are explicit.
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
    """Patches in reading order, one product each; class token and registers in front; and positions."""
    rows = []
    for top in range(0, images.shape[2], patch):
        for left in range(0, images.shape[3], patch):
            pixels = images[:, :, top : top + patch, left : left + patch].flatten(1)
            rows.append(pixels @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"])
    tokens = torch.stack(rows, 1)
    for name in ("reg_token", "cls_token"):
        if name in w:
            tokens = torch.cat([w[name].expand(len(images), -1, -1), tokens], 1)
    return tokens + w["pos_embed"]


def prefix_of(w):
    """How many tokens stand before the patches."""
    return sum(w[name].shape[1] for name in ("reg_token", "cls_token") if name in w)


def run_blocks(w, x, heads, replace=None, masks=None, prefix="blocks"):
    """Tokens (B, N, D) through all blocks of that prefix: tokens, and per layer {"q", "k", "v": (B, H, N, d),
    "map": (B, H, N, N), "stream": (B, N, D)} as they were used.

    `replace` {layer: {(part, head): (B, N, d) or, for "map", (B, N, N) or a function from the head's own map
    to such a one}}: what one head of one layer uses instead. `masks` {(layer, branch): (B,)}: factors on the
    attention (0) and the MLP (1) branch.
    """
    seen = []
    for layer in range(sum(name.startswith(prefix) and name.endswith("attn.qkv.weight") for name in w)):
        start = f"{prefix}.{layer}."
        part = {name.removeprefix(start): value for name, value in w.items() if name.startswith(start)}
        given = {} if replace is None else replace.get(layer, {})
        y = layer_norm(x, part["norm1.weight"], part["norm1.bias"])
        width = y.shape[-1]
        d = width // heads
        used = {"q": [], "k": [], "v": [], "map": []}
        outputs = []
        for head in range(heads):
            for third, name in enumerate("qkv"):
                rows = slice(third * width + head * d, third * width + (head + 1) * d)
                own = y @ part["attn.qkv.weight"][rows].T + part["attn.qkv.bias"][rows]
                used[name].append(given.get((name, head), own))
            scores = torch.einsum("bid,bjd->bij", used["q"][head], used["k"][head]) / math.sqrt(d)
            p = given.get(("map", head), softmax(scores))
            used["map"].append(p(softmax(scores)) if callable(p) else p)
            outputs.append(torch.einsum("bij,bjd->bid", used["map"][head], used["v"][head]))
        routed = torch.cat(outputs, -1) @ part["attn.proj.weight"].T + part["attn.proj.bias"]
        x = x + factor(masks, layer, 0) * routed
        y = layer_norm(x, part["norm2.weight"], part["norm2.bias"])
        y = gelu(y @ part["mlp.fc1.weight"].T + part["mlp.fc1.bias"])
        x = x + factor(masks, layer, 1) * (y @ part["mlp.fc2.weight"].T + part["mlp.fc2.bias"])
        seen.append({name: torch.stack(values, 1) for name, values in used.items()} | {"stream": x})
    return x, seen


def of_heads(part, x, heads=None):
    """What is replaced in one layer, by (B, H, N, d) or (B, H, N, N)."""
    return {(part, head): x[:, head] for head in (range(x.shape[1]) if heads is None else heads)}


def layers(w, images, heads, patch=8, **instead):
    """Logits (B, classes), and the layers that `run_blocks` saw; `instead` is what that takes."""
    x, seen = run_blocks(w, embed(w, images, patch), heads, **instead)
    return classify(w, x), seen


def classify(w, x):
    """Logits (B, classes) from the tokens after the last block."""
    if "fc_norm.weight" in w:  # average pooling over all patches, then the norm
        pooled = layer_norm(x[:, prefix_of(w) :].mean(1), w["fc_norm.weight"], w["fc_norm.bias"])
    else:  # the class token
        pooled = layer_norm(x, w["norm.weight"], w["norm.bias"])[:, 0]
    return pooled @ w["head.weight"].T + w["head.bias"]


def factor(masks, layer, branch):
    return 1.0 if masks is None else masks[layer, branch][:, None, None]


def cross_entropy(logits, labels):
    return -torch.stack([(row - row.logsumexp(0))[label] for row, label in zip(logits, labels)]).mean()


def family(
    teacher,
    student,
    images,
    what="map",
    how="copy",
    pairs=None,
    chosen=None,
    teacher_heads=3,
    heads=3,
    teacher_patch=8,
    target=None,
    own=None,
    masks=None,
    teacher_masks=None,
):
    """One teacher-student step from two dicts of weights: the student's logits and the transfer loss.

    `pairs` {student's layer: teacher's layer}; `chosen` {student's layer: heads}, all heads where a layer is
    not named; `target`, `own`: what is done to the teacher's and the student's maps (a list of (B, H, N, N),
    changed to such a list).
    """
    with torch.no_grad():
        of_teacher = layers(teacher, images, teacher_heads, teacher_patch, masks=teacher_masks)[1]
        given = [of_teacher[layer][what] for layer in pairs.values()]
        given = given if target is None else target(given)
    chosen = {} if chosen is None else chosen
    if how == "copy":
        replace = {layer: of_heads(what, x, chosen.get(layer)) for layer, x in zip(pairs, given)}
        return layers(student, images, heads, replace=replace, masks=masks)[0], torch.zeros(())
    logits, seen = layers(student, images, heads, masks=masks)
    mine = [seen[layer][what] for layer in pairs]
    mine = mine if own is None else own(mine)
    total = 0.0
    for layer, x, y in zip(pairs, mine, given):
        which = list(chosen.get(layer, range(x.shape[1])))
        x, y = torch.stack([x[:, head] for head in which]), torch.stack([y[:, head] for head in which])
        total = total + ((-(y * x.log()).sum(-1)).mean() if what == "map" else ((x - y) ** 2).mean())
    return logits, total


def averaged(maps, over):
    """Every map replaced by the mean over all examples, layers, heads or queries."""
    if over == "layers":
        return [sum(maps) / len(maps)] * len(maps)
    axis = {"examples": 0, "heads": 1, "queries": 2}[over]
    return [sum(p.unbind(axis)).unsqueeze(axis).expand_as(p) / p.shape[axis] for p in maps]


def merged(p, temperature=10):
    """All heads as one: softmax of the summed log-maps over the temperature, (B, 1, N, N)."""
    return softmax(sum(head.log() for head in p.unbind(1)) / temperature).unsqueeze(1)


def without(p, tokens):
    """The map among the other tokens, rows divided by what is left of them."""
    kept = [token for token in range(p.shape[-1]) if token not in tokens]
    left = p[:, :, kept][:, :, :, kept]
    return left / left.sum(-1, keepdim=True)


def partly(p, own, rows, extra):
    """One head's map (B, N, N) row by row: a row of `rows` gives to the tokens `extra` what it gives in
    `own`, and of p, a map among the others, what is left; any other row is that of `own`."""
    N = own.shape[-1]
    others = [token for token in range(N) if token not in extra]
    whole = []
    for i in range(N):
        if i not in rows:
            whole.append(own[:, i])
            continue
        left = 1 - sum((own[:, i, token] for token in extra), torch.zeros(len(own), dtype=own.dtype))
        row = [
            own[:, i, j] if j in extra else left * p[:, others.index(i), others.index(j)] for j in range(N)
        ]
        whole.append(torch.stack(row, -1))
    return torch.stack(whole, 1)


def cubic(x, a):
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def cubic_weights(before, after):
    """What each of `after` pixels takes from each of `before`: Keys' cubic kernel, pixels as areas, the
    border repeated.

    Where a side shrinks more than twofold: the kernel stretched over all pixels that a new one covers, and
    cut at the border.
    """
    table, step = torch.zeros(after, before, dtype=torch.float64), before / after
    for new in range(after):
        centre = (new + 0.5) * step - 0.5
        if step > 2:
            row = [cubic((old - centre) / step, -0.5) for old in range(before)]
            table[new] = torch.tensor(row, dtype=torch.float64) / sum(row)
        else:
            for old in range(math.floor(centre) - 1, math.floor(centre) + 3):
                table[new, min(max(old, 0), before - 1)] += cubic(old - centre, -0.75)
    return table


def on_grid(p, before, after, prefix):
    """A map of one grid of patches, (down, across), on another: keys, then queries, interpolated, clamped,
    and rescaled.

    What a query gives to the prefix tokens as a whole is kept; for patches that share is interpolated like
    everything else.
    """
    table = torch.kron(*(cubic_weights(*sides) for sides in zip(before, after)))

    def scaled(x, total):
        x = x.clamp(min=0)
        return torch.where(x > 0, x * total / x.sum(-1, keepdim=True), 0.0)  # nothing but zeros stays zero

    patches = scaled(p[..., prefix:] @ table.T, p[..., prefix:].sum(-1, keepdim=True))
    rows = torch.cat([p[..., :prefix], patches], -1)
    moved = table @ rows[:, :, prefix:]
    share = moved[..., :prefix].sum(-1, keepdim=True).clamp(0, 1)
    parts = [scaled(moved[..., prefix:], 1 - share)]
    if prefix:
        parts.insert(0, scaled(moved[..., :prefix], share))
    return torch.cat([rows[:, :, :prefix], torch.cat(parts, -1)], 2)
