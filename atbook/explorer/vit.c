/* The book's Vision Transformer, trained in a page: forward, backward, and AdamW, on four numbers at a time.

clang compiles it to WebAssembly (`make wasm`); learning.js calls what is marked EXPORT, and moves bytes into and out
of the arrays that it gives away. A module holds one model and one batch of B images. Letters are the paper's and the
book's: N tokens of width D, H heads of width d, L layers. A matrix is its rows one after the other, and its shape
stands where it is written.

Every forward function has its backward one below it. There, `dx` is what the loss changes by when x does: the
gradient of the loss, of the shape of x. Weights have theirs in `gradients`, which is a model like `weights`. */

enum { SIDE = 32, PATCH = 8, ACROSS = SIDE / PATCH, PIXELS = 3 * PATCH * PATCH, CELLS = ACROSS * ACROSS };
enum { N = 1 + CELLS, D = 64, H = 4, d = D / H, L = 4, HIDDEN = 4 * D, CLASSES = 8 };
enum { MOST = 128, ROWS = MOST * N }; // the largest batch, and the tokens in it

#define EXPORT(name) __attribute__((export_name(#name)))
extern double log(double); // the page's Math.log; what is needed more often is below

/* ---- The model: tensors in the order of timm's state_dict, so that a flat list of numbers is a model ---- */

typedef struct {
  float norm1_weight[D], norm1_bias[D];
  float qkv_weight[3 * D * D], qkv_bias[3 * D]; // rows: q of all heads, then k, then v
  float proj_weight[D * D], proj_bias[D];
  float norm2_weight[D], norm2_bias[D];
  float fc1_weight[HIDDEN * D], fc1_bias[HIDDEN];
  float fc2_weight[D * HIDDEN], fc2_bias[D];
} Block;

typedef struct {
  float cls_token[D], pos_embed[N * D];
  float patch_weight[D * PIXELS], patch_bias[D];
  Block blocks[L];
  float norm_weight[D], norm_bias[D];
  float head_weight[CLASSES * D], head_bias[CLASSES];
} ViT;

enum { NUMBERS = sizeof(ViT) / sizeof(float) };
static ViT weights, gradients, means, squares; // the last two: AdamW's running means of gradients and their squares

/* ---- A batch: what goes in, what comes out, and what the forward pass keeps for the backward pass ---- */

static unsigned char bytes[MOST][3][SIDE][SIDE];
static int labels[MOST];
static float maps[MOST][L][H][N][N]; // the student's own, or those that it is given
static float logits[MOST * CLASSES];

typedef struct {
  float centred[ROWS * D]; // scaled to variance 1
  float scale[ROWS];       // by this factor
  float out[ROWS * D];     // times weight, plus bias
} Normed;

typedef struct {
  Normed norm1, norm2;
  float qkv[ROWS * 3 * D];     // (B N, 3 D)
  float mixed[ROWS * D];       // map times v, heads side by side
  float hidden[ROWS * HIDDEN]; // behind GELU ...
  float slope[ROWS * HIDDEN];  // ... and GELU's derivative
} Seen;

static float patches[MOST * CELLS * PIXELS];
static Seen seen[L];
static Normed last;                              // of the class tokens alone: only they are read
static float stream[ROWS * D], dstream[ROWS * D]; // the residual stream, tokens (B N, D), and its gradient
static float wide[ROWS * HIDDEN], narrow[ROWS * D]; // for one function at a time

/* ---- Products of matrices: nine tenths of the time ---- */

typedef float f4 __attribute__((vector_size(16)));
typedef struct {
  float *at;
  int row, column; // how far apart in memory are two rows, and two columns
} Matrix;

static Matrix matrix(float *at, int row) { return (Matrix){at, row, 1}; }
static Matrix transposed(Matrix A) { return (Matrix){A.at, A.column, A.row}; }

/* C (m, n) = A (m, k) B (k, n), or C += A B. m is a multiple of 4, n of 8, and rows of B and C lie in one piece. Four
   rows and eight columns of C stay in registers: each number that is read serves four or eight multiplications.
   `depth` rows of B at a time, so that they stay in the fastest cache. */
static void product(Matrix C, Matrix A, Matrix B, int m, int k, int n, int add) {
  const int depth = 256;
  for (int from = 0; from < k; from += depth, add = 1) {
    const int to = from + depth < k ? from + depth : k;
    for (int j = 0; j < n; j += 8) {
      for (int i = 0; i < m; i += 4) {
        f4 sum[4][2] = {{{0}}};
        for (int p = from; p < to; p++) {
          const f4 *b = (const f4 *)(B.at + p * B.row + j);
          for (int r = 0; r < 4; r++) {
            const float a = A.at[(i + r) * A.row + p * A.column];
            sum[r][0] += a * b[0];
            sum[r][1] += a * b[1];
          }
        }
        for (int r = 0; r < 4; r++) {
          f4 *c = (f4 *)(C.at + (i + r) * C.row + j);
          c[0] = add ? c[0] + sum[r][0] : sum[r][0];
          c[1] = add ? c[1] + sum[r][1] : sum[r][1];
        }
      }
    }
  }
}

/* y (n, out) = x (n, in) weightᵀ + bias, for weight (out, in) as torch keeps it. y's rows may be parts of longer ones. */
static void linear(Matrix y, const float *x, const float *weight, const float *bias, int n, int in, int out) {
  static float turned[HIDDEN * D]; // weightᵀ, whose rows lie in one piece
  for (int o = 0; o < out; o++)
    for (int i = 0; i < in; i++) turned[i * out + o] = weight[o * in + i];
  product(y, matrix((float *)x, in), matrix(turned, out), n, in, out, 0);
  for (int row = 0; row < n; row++)
    for (int o = 0; o < out; o++) y.at[row * y.row + o] += bias[o];
}

/* dweight and dbias are added to, and dx (n, in) is written, or added to; none where dx is 0. */
static void linear_backward(float *dx, float *dweight, float *dbias, Matrix dy, const float *x, const float *weight,
                            int n, int in, int out, int add) {
  product(matrix(dweight, in), transposed(dy), matrix((float *)x, in), out, n, in, 1);
  for (int row = 0; row < n; row++)
    for (int o = 0; o < out; o++) dbias[o] += dy.at[row * dy.row + o];
  if (dx) product(matrix(dx, in), dy, matrix((float *)weight, in), n, out, in, add);
}

/* ---- Functions of single numbers; clang makes them functions of four ---- */

/* e^x to float32's precision, for x ≤ 0: 2^whole times a series for the rest, which is at most ln 2 / 2. */
static inline float exponential(float x) {
  x = x < -87 ? -87 : x; // below that it would not be a normal float
  const float whole = __builtin_rintf(x * 1.44269504f);
  const float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f; // ln 2 in two parts: the first one is exact
  const float series = 1 + rest * (1 + rest * (1.f / 2 + rest * (1.f / 6 + rest * (1.f / 24 + rest * (1.f / 120 + rest / 720)))));
  const union { int bits; float value; } power = {((int)whole + 127) << 23};
  return series * power.value;
}

/* hidden = GELU(hidden) = hidden Φ(hidden), and its slope Φ + hidden φ. Φ, the normal distribution function, is
   Abramowitz and Stegun 1964, formula 7.1.26: to 1.5e-7, which is float32's precision. */
static void gelu(float *hidden, float *slope, int size) {
  for (int i = 0; i < size; i++) {
    const float x = hidden[i], positive = x < 0 ? -x : x;
    const float bell = exponential(-0.5f * x * x), t = 1 / (1 + 0.3275911f * 0.70710678f * positive);
    const float series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float above = 0.5f * series * bell, share = x < 0 ? above : 1 - above;
    hidden[i] = x * share;
    slope[i] = share + x * bell * 0.39894228f;
  }
}

/* ---- Layer norm: every row centred and scaled to variance 1, then weight (D,) and bias (D,) ---- */

/* n rows of x, `stride` apart. */
static void layer_norm(Normed *y, const float *x, int stride, const float *weight, const float *bias, int n) {
  for (int row = 0; row < n; row++) {
    const float *in = x + row * stride;
    float *centred = y->centred + row * D, mean = 0, variance = 0;
    for (int i = 0; i < D; i++) mean += in[i];
    mean /= D;
    for (int i = 0; i < D; i++) variance += (in[i] - mean) * (in[i] - mean);
    const float scale = y->scale[row] = 1 / __builtin_sqrtf(variance / D + 1e-6f); // timm's epsilon for ViTs
    for (int i = 0; i < D; i++) {
      centred[i] = (in[i] - mean) * scale;
      y->out[row * D + i] = centred[i] * weight[i] + bias[i];
    }
  }
}

/* Adds to dx. Mean and scale depend on the row too: what dy has along the row itself, and along ones, is taken out. */
static void layer_norm_backward(float *dx, int stride, float *dweight, float *dbias, const float *dy, const Normed *y,
                                const float *weight, int n) {
  for (int row = 0; row < n; row++) {
    const float *centred = y->centred + row * D, *dout = dy + row * D;
    float mean = 0, along = 0;
    for (int i = 0; i < D; i++) {
      mean += dout[i] * weight[i] / D;
      along += dout[i] * weight[i] * centred[i] / D;
    }
    for (int i = 0; i < D; i++) {
      dweight[i] += dout[i] * centred[i];
      dbias[i] += dout[i];
      dx[row * stride + i] += y->scale[row] * (dout[i] * weight[i] - mean - centred[i] * along);
    }
  }
}

/* ---- Attention, of one head of one image: q, k, v are columns of rows of qkv, 3 D long ---- */

static float dot(const float *a, const float *b) {
  float sum = 0;
  for (int c = 0; c < d; c++) sum += a[c] * b[c];
  return sum;
}

static void add_times(float *to, float factor, const float *a) {
  for (int c = 0; c < d; c++) to[c] += factor * a[c];
}

static const float SHRINK = 0.25f; // 1 / √d

/* map (N, N) = softmax(q kᵀ / √d): rows sum to 1. */
static void own_map(float map[N][N], const float *q, const float *k) {
  for (int i = 0; i < N; i++) {
    float most = -1e30f, total = 0;
    for (int j = 0; j < N; j++) {
      map[i][j] = SHRINK * dot(q + i * 3 * D, k + j * 3 * D);
      if (map[i][j] > most) most = map[i][j];
    }
    for (int j = 0; j < N; j++) total += map[i][j] = exponential(map[i][j] - most);
    for (int j = 0; j < N; j++) map[i][j] /= total;
  }
}

/* mixed (N, d), columns of D = map (N, N) v (N, d). */
static void mix(float *mixed, float map[N][N], const float *v) {
  for (int i = 0; i < N; i++) {
    for (int c = 0; c < d; c++) mixed[i * D + c] = 0;
    for (int j = 0; j < N; j++) add_times(mixed + i * D, map[i][j], v + j * 3 * D);
  }
}

static void mix_backward(float *dv, const float *dmixed, float map[N][N]) {
  for (int j = 0; j < N; j++) {
    for (int c = 0; c < d; c++) dv[j * 3 * D + c] = 0;
    for (int i = 0; i < N; i++) add_times(dv + j * 3 * D, map[i][j], dmixed + i * D);
  }
}

/* Only of a map that is the student's own: one that it was given does not depend on its weights. */
static void own_map_backward(float *dq, float *dk, const float *dmixed, float map[N][N], const float *q, const float *k,
                             const float *v) {
  for (int i = 0; i < N; i++)
    for (int c = 0; c < d; c++) dq[i * 3 * D + c] = dk[i * 3 * D + c] = 0;
  for (int i = 0; i < N; i++) {
    float dmap[N], mean = 0;
    for (int j = 0; j < N; j++) {
      dmap[j] = dot(dmixed + i * D, v + j * 3 * D);
      mean += map[i][j] * dmap[j];
    }
    for (int j = 0; j < N; j++) {
      const float dlogit = SHRINK * map[i][j] * (dmap[j] - mean); // rows sum to 1: only differences from the mean count
      add_times(dq + i * 3 * D, dlogit, k + j * 3 * D);
      add_times(dk + j * 3 * D, dlogit, q + i * 3 * D);
    }
  }
}

/* ---- One block: x + attention(norm(x)), then x + MLP(norm(x)), on `stream` ---- */

/* given: the maps are there. q and k then have nothing to say, and are not computed: that is all of Copy. */
static void block_forward(int layer, int B, int given) {
  const Block *w = &weights.blocks[layer];
  Seen *s = &seen[layer];
  const int n = B * N, skip = given ? 2 * D : 0; // the columns of q and k
  layer_norm(&s->norm1, stream, D, w->norm1_weight, w->norm1_bias, n);
  linear(matrix(s->qkv + skip, 3 * D), s->norm1.out, w->qkv_weight + skip * D, w->qkv_bias + skip, n, D, 3 * D - skip);
  for (int b = 0; b < B; b++) {
    for (int h = 0; h < H; h++) {
      const float *q = s->qkv + b * N * 3 * D + h * d, *k = q + D, *v = k + D;
      if (!given) own_map(maps[b][layer][h], q, k);
      mix(s->mixed + b * N * D + h * d, maps[b][layer][h], v);
    }
  }
  linear(matrix(narrow, D), s->mixed, w->proj_weight, w->proj_bias, n, D, D);
  for (int i = 0; i < n * D; i++) stream[i] += narrow[i];
  layer_norm(&s->norm2, stream, D, w->norm2_weight, w->norm2_bias, n);
  linear(matrix(s->hidden, HIDDEN), s->norm2.out, w->fc1_weight, w->fc1_bias, n, D, HIDDEN);
  gelu(s->hidden, s->slope, n * HIDDEN);
  linear(matrix(narrow, D), s->hidden, w->fc2_weight, w->fc2_bias, n, HIDDEN, D);
  for (int i = 0; i < n * D; i++) stream[i] += narrow[i];
}

/* The same from its end to its beginning. dstream is not changed by a sum, and each branch adds to it. */
static void block_backward(int layer, int B, int given) {
  const Block *w = &weights.blocks[layer];
  Block *dw = &gradients.blocks[layer];
  Seen *s = &seen[layer];
  const int n = B * N, skip = given ? 2 * D : 0;
  linear_backward(wide, dw->fc2_weight, dw->fc2_bias, matrix(dstream, D), s->hidden, w->fc2_weight, n, HIDDEN, D, 0);
  for (int i = 0; i < n * HIDDEN; i++) wide[i] *= s->slope[i];
  linear_backward(narrow, dw->fc1_weight, dw->fc1_bias, matrix(wide, HIDDEN), s->norm2.out, w->fc1_weight, n, D, HIDDEN, 0);
  layer_norm_backward(dstream, D, dw->norm2_weight, dw->norm2_bias, narrow, &s->norm2, w->norm2_weight, n);
  linear_backward(narrow, dw->proj_weight, dw->proj_bias, matrix(dstream, D), s->mixed, w->proj_weight, n, D, D, 0);
  float *dqkv = wide; // (B N, 3 D)
  for (int b = 0; b < B; b++) {
    for (int h = 0; h < H; h++) {
      const int at = b * N * 3 * D + h * d;
      const float *q = s->qkv + at, *k = q + D, *v = k + D, *dmixed = narrow + b * N * D + h * d;
      float *dq = dqkv + at, *dk = dq + D, *dv = dk + D;
      mix_backward(dv, dmixed, maps[b][layer][h]);
      if (!given) own_map_backward(dq, dk, dmixed, maps[b][layer][h], q, k, v);
    }
  }
  linear_backward(narrow, dw->qkv_weight + skip * D, dw->qkv_bias + skip, matrix(dqkv + skip, 3 * D), s->norm1.out,
                  w->qkv_weight + skip * D, n, D, 3 * D - skip, 0);
  layer_norm_backward(dstream, D, dw->norm1_weight, dw->norm1_bias, narrow, &s->norm1, w->norm1_weight, n);
}

/* ---- The whole model ---- */

/* From bytes to tokens: patches, rows first, each (3, PATCH, PATCH); the class token before them; positions added. */
static void embed(int B, float mean, float std) {
  for (int b = 0; b < B; b++)
    for (int cell = 0; cell < CELLS; cell++)
      for (int i = 0; i < PIXELS; i++) {
        const int colour = i / (PATCH * PATCH), row = i / PATCH % PATCH, column = i % PATCH;
        const int y = cell / ACROSS * PATCH + row, x = cell % ACROSS * PATCH + column;
        patches[(b * CELLS + cell) * PIXELS + i] = (bytes[b][colour][y][x] / 255.f - mean) / std;
      }
  linear(matrix(wide, D), patches, weights.patch_weight, weights.patch_bias, B * CELLS, PIXELS, D);
  for (int b = 0; b < B; b++)
    for (int token = 0; token < N; token++)
      for (int i = 0; i < D; i++) {
        const float own = token == 0 ? weights.cls_token[i] : wide[(b * CELLS + token - 1) * D + i];
        stream[(b * N + token) * D + i] = own + weights.pos_embed[token * D + i];
      }
}

static void embed_backward(int B) {
  for (int b = 0; b < B; b++)
    for (int token = 0; token < N; token++)
      for (int i = 0; i < D; i++) {
        const float d_own = dstream[(b * N + token) * D + i];
        gradients.pos_embed[token * D + i] += d_own;
        if (token == 0) gradients.cls_token[i] += d_own;
        else wide[(b * CELLS + token - 1) * D + i] = d_own;
      }
  linear_backward(0, gradients.patch_weight, gradients.patch_bias, matrix(wide, D), patches, weights.patch_weight, B * CELLS,
                  PIXELS, D, 0);
}

/* What the model answers to B images, B a multiple of 4: logits (B, CLASSES). given: with the maps that are in `maps`;
   else it makes its own, and they are there afterwards. mean, std: how pixels are prepared. */
EXPORT(forward) void forward(int B, int given, float mean, float std) {
  embed(B, mean, std);
  for (int layer = 0; layer < L; layer++) block_forward(layer, B, given);
  layer_norm(&last, stream, N * D, weights.norm_weight, weights.norm_bias, B);
  linear(matrix(logits, CLASSES), last.out, weights.head_weight, weights.head_bias, B, D, CLASSES);
}

/* After `forward`: the mean over the images of the cross-entropy with the labels, of which `smoothing` is spread over
   all classes. Writes `gradients`. */
EXPORT(backward) float backward(int B, int given, float smoothing) {
  static float dlogits[MOST * CLASSES];
  float *zero = (float *)&gradients, loss = 0;
  for (int i = 0; i < NUMBERS; i++) zero[i] = 0;
  for (int i = 0; i < B * N * D; i++) dstream[i] = 0; // patches' last tokens are read by nothing
  for (int b = 0; b < B; b++) {
    const float *logit = logits + b * CLASSES;
    float most = logit[0], total = 0;
    for (int c = 1; c < CLASSES; c++) most = logit[c] > most ? logit[c] : most;
    for (int c = 0; c < CLASSES; c++) total += exponential(logit[c] - most);
    for (int c = 0; c < CLASSES; c++) {
      const float wanted = smoothing / CLASSES + (c == labels[b] ? 1 - smoothing : 0);
      loss += wanted * ((float)log(total) + most - logit[c]) / B;
      dlogits[b * CLASSES + c] = (exponential(logit[c] - most) / total - wanted) / B;
    }
  }
  linear_backward(narrow, gradients.head_weight, gradients.head_bias, matrix(dlogits, CLASSES), last.out, weights.head_weight,
                  B, D, CLASSES, 0);
  layer_norm_backward(dstream, N * D, gradients.norm_weight, gradients.norm_bias, narrow, &last, weights.norm_weight, B);
  for (int layer = L - 1; layer >= 0; layer--) block_backward(layer, B, given);
  embed_backward(B);
  return loss;
}

/* ---- AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), as torch computes it ---- */

static const double BETA1 = 0.9, BETA2 = 0.999;
static float rate, debias1, debias2, shorten; // of this step: the learning rate, and what is the same for all weights

static void update(float *w, int size, float decay) {
  const int from = w - (float *)&weights; // the same place in every model
  float *g = (float *)&gradients + from, *m = (float *)&means + from, *v = (float *)&squares + from;
  for (int i = 0; i < size; i++) {
    const float gradient = shorten * g[i];
    m[i] = (float)BETA1 * m[i] + (float)(1 - BETA1) * gradient;
    v[i] = (float)BETA2 * v[i] + (float)(1 - BETA2) * gradient * gradient;
    w[i] = w[i] * (1 - rate * decay) - rate * (m[i] / debias1) / (__builtin_sqrtf(v[i] / debias2) + 1e-8f);
  }
}

/* Change the weights by their gradients, in the step-th step (from 1). The gradient of all weights together is cut to
   the length `clip`. As in timm, what is no matrix is not decayed: biases, norms, positions, the class token. Returns
   the gradient's length before. */
EXPORT(adamw) float adamw(int step, float lr, float decay, float clip) {
  double length = 0, power1 = 1, power2 = 1;
  for (int i = 0; i < NUMBERS; i++) length += (double)((float *)&gradients)[i] * ((float *)&gradients)[i];
  for (int i = 0; i < step; i++) power1 *= BETA1, power2 *= BETA2;
  length = __builtin_sqrt(length);
  rate = lr, debias1 = 1 - power1, debias2 = 1 - power2; // the means begin at 0, and would be too small
  shorten = length + 1e-6 > clip ? clip / (length + 1e-6) : 1;
  update(weights.cls_token, D + N * D, 0);
  update(weights.patch_weight, D * PIXELS, decay);
  update(weights.patch_bias, D, 0);
  for (int layer = 0; layer < L; layer++) {
    Block *w = &weights.blocks[layer];
    update(w->norm1_weight, 2 * D, 0);
    update(w->qkv_weight, 3 * D * D, decay);
    update(w->qkv_bias, 3 * D, 0);
    update(w->proj_weight, D * D, decay);
    update(w->proj_bias, 3 * D, 0); // and the norm's weight and bias behind it
    update(w->fc1_weight, HIDDEN * D, decay);
    update(w->fc1_bias, HIDDEN, 0);
    update(w->fc2_weight, D * HIDDEN, decay);
    update(w->fc2_bias, D, 0);
  }
  update(weights.norm_weight, 2 * D, 0);
  update(weights.head_weight, CLASSES * D, decay);
  update(weights.head_bias, CLASSES, 0);
  return length;
}

/* ---- Where the page finds what it puts in and takes out ---- */

EXPORT(weights_at) float *weights_at(void) { return (float *)&weights; }
EXPORT(gradients_at) float *gradients_at(void) { return (float *)&gradients; }
EXPORT(numbers) int numbers(void) { return NUMBERS; } // of a model
EXPORT(bytes_at) unsigned char *bytes_at(void) { return &bytes[0][0][0][0]; }
EXPORT(labels_at) int *labels_at(void) { return labels; }
EXPORT(maps_at) float *maps_at(void) { return &maps[0][0][0][0][0]; }
EXPORT(logits_at) float *logits_at(void) { return logits; }
EXPORT(most_images) int most_images(void) { return MOST; }
