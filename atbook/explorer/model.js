/* The book's Vision Transformer for one image, as timm computes it, with any layer's attention map replaceable.

N = 17 tokens (the class token, then 16 patches, rows first), D = 64 wide, H = 4 heads of d = 16, L = 4 layers.
A matrix is a Float32Array of its rows one after the other; its shape is in the comments. Sums are made in double
precision, so results differ from torch's by float32's rounding. */
"use strict";
(() => {
  /* x (n, in) to (n, out): weight is (out, in), as torch keeps it; bias (out,). */
  function linear(x, weight, bias) {
    const out = bias.length, width = weight.length / out, n = x.length / width;
    const y = new Float32Array(n * out);
    for (let row = 0; row < n; row++) {
      for (let o = 0; o < out; o++) {
        let sum = bias[o];
        for (let i = 0, a = row * width, b = o * width; i < width; i++) sum += x[a + i] * weight[b + i];
        y[row * out + o] = sum;
      }
    }
    return y;
  }

  /* x (n, D) to (n, D): every row centred and scaled to variance 1, then weight (D,) and bias (D,). */
  function layerNorm(x, weight, bias) {
    const D = bias.length, y = new Float32Array(x.length);
    for (let start = 0; start < x.length; start += D) {
      let mean = 0, variance = 0;
      for (let i = 0; i < D; i++) mean += x[start + i] / D;
      for (let i = 0; i < D; i++) variance += (x[start + i] - mean) ** 2 / D;
      const scale = 1 / Math.sqrt(variance + 1e-6); // timm's epsilon for ViTs; torch's own would be 1e-5
      for (let i = 0; i < D; i++) y[start + i] = (x[start + i] - mean) * scale * weight[i] + bias[i];
    }
    return y;
  }

  /* The error function to 1.5e-7, which is float32's precision: Abramowitz and Stegun 1964, formula 7.1.26. */
  function erf(x) {
    const t = 1 / (1 + 0.3275911 * Math.abs(x));
    const series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)));
    return Math.sign(x) * (1 - t * series * Math.exp(-x * x));
  }

  const gelu = x => x.map(v => v * 0.5 * (1 + erf(v * Math.SQRT1_2)));
  const add = (x, y) => x.map((v, i) => v + y[i]);

  /* What linear made of a token is q, k and v of all heads, (N, 3 D); `part` 0, 1, 2 and a head find d columns. */
  const column = (part, head, H, d) => (part * H + head) * d;

  /* qkv (N, 3 D) to the map (H, N, N): softmax(q kᵀ / √d), rows sum to 1. */
  function attentionMap(qkv, N, H) {
    const D = qkv.length / N / 3, d = D / H, map = new Float32Array(H * N * N), row = new Float64Array(N);
    for (let head = 0; head < H; head++) {
      for (let i = 0; i < N; i++) {
        const q = i * 3 * D + column(0, head, H, d);
        for (let j = 0; j < N; j++) {
          const k = j * 3 * D + column(1, head, H, d);
          let sum = 0;
          for (let c = 0; c < d; c++) sum += qkv[q + c] * qkv[k + c];
          row[j] = sum / Math.sqrt(d);
        }
        const largest = Math.max(...row); // exp then cannot overflow
        let total = 0;
        for (let j = 0; j < N; j++) total += row[j] = Math.exp(row[j] - largest);
        for (let j = 0; j < N; j++) map[(head * N + i) * N + j] = row[j] / total;
      }
    }
    return map;
  }

  /* map (H, N, N) times v, the last third of qkv (N, 3 D): (N, D), heads side by side. */
  function mix(map, qkv, N, H) {
    const D = qkv.length / N / 3, d = D / H, mixed = new Float32Array(N * D);
    for (let head = 0; head < H; head++) {
      for (let i = 0; i < N; i++) {
        for (let c = 0; c < d; c++) {
          let sum = 0;
          for (let j = 0; j < N; j++) sum += map[(head * N + i) * N + j] * qkv[j * 3 * D + column(2, head, H, d) + c];
          mixed[i * D + head * d + c] = sum;
        }
      }
    }
    return mixed;
  }

  /* pixels (3, 32, 32) to (16, 192): the patches, rows first, each in the order of the embedding's weight. */
  function patchify(pixels, patch) {
    const side = Math.sqrt(pixels.length / 3), across = side / patch, size = 3 * patch * patch;
    const patches = new Float32Array(across * across * size);
    for (let i = 0; i < patches.length; i++) {
      const cell = Math.floor(i / size), colour = Math.floor(i % size / patch ** 2), within = i % patch ** 2;
      const row = Math.floor(cell / across) * patch + Math.floor(within / patch);
      const place = (cell % across) * patch + within % patch;
      patches[i] = pixels[(colour * side + row) * side + place];
    }
    return patches;
  }

  /* pixels (3, 32, 32) to tokens (N, D): the class token first, positions added. */
  function embed(get, pixels) {
    const weight = get("patch_embed.proj.weight"), bias = get("patch_embed.proj.bias"), cls = get("cls_token");
    const patch = Math.sqrt(weight.length / bias.length / 3);
    const patches = linear(patchify(pixels, patch), weight, bias);
    const tokens = new Float32Array(cls.length + patches.length);
    tokens.set(cls);
    tokens.set(patches, cls.length);
    return add(tokens, get("pos_embed"));
  }

  /* One pre-norm block, tokens (N, D) to (N, D): x + attention(norm(x)), then x + MLP(norm(x)). `instead` is a map
     (H, N, N) to use in place of its own, a function that makes one of its own, or nothing. */
  function block(get, tokens, H, instead) {
    const D = get("norm1.bias").length, N = tokens.length / D;
    const apply = (part, name, x) => part(x, get(`${name}.weight`), get(`${name}.bias`));
    const qkv = apply(linear, "attn.qkv", apply(layerNorm, "norm1", tokens)); // (N, 3 D)
    const own = () => attentionMap(qkv, N, H);
    const map = typeof instead === "function" ? instead(own()) : instead ?? own(); // (H, N, N)
    const routed = add(tokens, apply(linear, "attn.proj", mix(map, qkv, N, H))); // (N, D)
    const hidden = gelu(apply(linear, "mlp.fc1", apply(layerNorm, "norm2", routed))); // (N, 4 D)
    return { map, tokens: add(routed, apply(linear, "mlp.fc2", hidden)) };
  }

  /* model: {heads, weights}, of `readModel`. pixels: (3, 32, 32), centred and scaled. instead: for each layer what
     `block` takes. Returns logits (classes,), and of every layer the map that it used, (H, N, N), and its tokens,
     (N, D). */
  function forward(model, pixels, instead = []) {
    const get = name => model.weights[name];
    const maps = [], stream = [];
    let tokens = embed(get, pixels);
    for (let layer = 0; get(`blocks.${layer}.norm1.bias`); layer++) {
      const seen = block(name => get(`blocks.${layer}.${name}`), tokens, model.heads, instead[layer]);
      maps.push(seen.map);
      stream.push(tokens = seen.tokens);
    }
    const last = layerNorm(tokens.subarray(0, get("norm.bias").length), get("norm.weight"), get("norm.bias"));
    return { logits: linear(last, get("head.weight"), get("head.bias")), maps, tokens: stream };
  }

  /* map (H, N, N) with some tokens' rows replaced in all heads: {token: N shares}, scaled to sum to 1. */
  function withRows(map, rows, N) {
    const H = map.length / N ** 2, painted = map.slice();
    for (const [token, shares] of Object.entries(rows)) {
      const total = shares.reduce((a, b) => a + b);
      for (let head = 0; head < H; head++) {
        painted.set(shares.map(share => share / total), (head * N + +token) * N);
      }
    }
    return painted;
  }

  /* L maps (H, N, N) in which every token looks at all alike. */
  const uniformMaps = (L, H, N) => Array.from({ length: L }, () => new Float32Array(H * N * N).fill(1 / N));

  /* Two characters a value, digits in the order of base64: see export.py. */
  const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const VALUE = new Uint8Array(128);
  for (let i = 0; i < 64; i++) VALUE[DIGITS.charCodeAt(i)] = i;

  function readTensor({ scale, text }) {
    const values = new Float32Array(text.length / 2);
    for (let i = 0; i < values.length; i++) {
      values[i] = (VALUE[text.charCodeAt(2 * i)] * 64 + VALUE[text.charCodeAt(2 * i + 1)] - 2048) * scale;
    }
    return values;
  }

  /* A world's model in the script of weights, ready for `forward`: {heads, maps, weights}. */
  function readModel(content, world, name) {
    const { heads, maps, tensors } = content.worlds[world][name] ?? content[name]; // "untrained" is in no world
    const read = Object.entries(tensors).map(([key, tensor]) => [key, readTensor(tensor)]);
    return { heads, maps, weights: Object.fromEntries(read) };
  }

  /* Bytes (3, 32, 32) as a model sees them: every step rounded to float32, as torch does. */
  function prepare(bytes, { mean, std }) {
    return Float32Array.from(bytes, byte => Math.fround(Math.fround(byte / 255) - mean) / std);
  }

  globalThis.Explorer = Object.assign(globalThis.Explorer ?? {}, { forward, withRows, uniformMaps, readModel, prepare });
})();
