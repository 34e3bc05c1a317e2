/* Forward pass of Llama and Qwen models over cached rows, and sampling, in float32 on a CPU.

   Built by native_build.py on the machine that runs it; called by compiled_decoder.py, which
   mirrors the structures below.

   Every number is computed by the same sequence of operations whatever the other tokens of the
   pass, the number of threads and the blocks are. So a token's logits do not depend on its
   neighbours, bit for bit. This needs -ffp-contract=off: a compiler that may fuse multiplications
   and additions does so in some variants of a tile and not in others. `fuse` does it everywhere. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Rows of a tile of products: with four columns, the sums fill the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 4
#else
#define TILE_ROWS 3
#endif

#define TILE_COLUMNS 4
#define INLINE static inline __attribute__((always_inline))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Eight __attribute__((vector_size(32)));

/* Most elements of a row, and number of elements of a block of the second factor of a product, that
   are read from the first-level cache. */
#define DEPTH 768
#define BLOCK 4096
/* Blocks of weights by which reading is ahead of computing. */
#define AHEAD 6
/* Floats of a line of the cache. */
#define LINE 16

/* Common columns from which the rows of a block read them together. */
#define MIN_SHARED 16
/* Tokens of a block of attention. */
#define BLOCK_TOKENS 16
/* Tokens of a piece whose earlier columns are read together. */
#define PIECE_TOKENS 8

struct layer {
    const float *attention_norm, *mlp_norm;
    const float *query_norm, *key_norm; /* NULL for a model without them. */
    const float *query, *key, *value, *out, *gate, *up, *down;
    /* NULL for layers without. */
    const float *query_bias, *key_bias, *value_bias, *out_bias, *gate_bias, *up_bias, *down_bias;
    float *keys, *values; /* (rows, kv heads, columns, dim). */
    float attention_eps, mlp_eps, query_eps, key_eps, scale, unused;
};

struct model {
    int64_t layers, hidden, intermediate, heads, kv_heads, dim, vocabulary;
    int64_t embeddings, rows, columns; /* Tokens of the embedding; rows and columns of the cache. */
    const float *embedding, *norm, *head, *head_bias;
    const float *cosine, *sine; /* (columns, dim), the sine of the first half negated. */
    const struct layer *layer;
    float norm_eps, unused;
};

struct pass {
    int64_t tokens, decoding, outputs;
    const int64_t *token, *row, *column; /* (tokens,). */
    const int64_t *start;  /* First token of the piece of each token; itself if it decodes. */
    const int64_t *output; /* Tokens whose logits are returned, (outputs,). */
    const int64_t *cached; /* Tokens of all rows, (rows, cached_columns). */
    int64_t cached_rows, cached_columns, width;
    int64_t *blocks; /* Workspace, (2, tokens). */
    float *logits; /* (outputs, vocabulary). */
    float *workspace;
    int64_t by_rows; /* Whether each thread computes some rows alone. */
    int64_t threads; /* Most threads; OpenMP may start fewer. */
    /* Functions of the OpenMP library that torch uses; NULL if there is one thread. */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread_number)(void);
    int (*thread_count)(void);
    void (*barrier)(void);
};

/* Part of a pass that a team of threads computes; a member of it is (number, members). */
struct part {
    const struct model *model;
    const struct pass *pass;
    int64_t first, tokens; /* Tokens of the pass. */
    int64_t first_output, outputs;
    int64_t number, members;
    int64_t *size, *shared; /* Of the block that begins with a token (see find_block). */
    float *x, *normed, *query, *key, *value, *mixed, *gate, *up, *scores, *packed, *gathered;
};

INLINE Vector load(const float *from) { return *(const Unaligned *)from; }
INLINE void store(float *to, Vector value) { *(Unaligned *)to = value; }
/* Keep a value in a register. Compilers would rather read it from memory in each use, but reads are
   the bottleneck of products. */
#if defined(__AVX512F__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__x86_64__)
#define KEEP(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v) (void)0
#endif

/* The first `count` lanes, and zeros. Remainders are computed in vectors too: compilers round sums
   of single numbers in different ways at different places. */
INLINE Vector load_some(const float *from, int64_t count) {
    Vector v = {0};
    memcpy(&v, from, sizeof(float) * count);
    return v;
}
INLINE void store_some(float *to, Vector value, int64_t count) {
    memcpy(to, &value, sizeof(float) * count);
}
INLINE Vector spread(float value) { return value - (Vector){0}; }
/* a * b + c, rounded once if the processor can. */
INLINE Vector fuse(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Sum of the lanes of four vectors, in an order that is the same for each of them. */
INLINE Four sum_lanes(Vector a, Vector b, Vector c, Vector d) {
#if LANES == 4
    Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
           __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#else
#if LANES == 16
#define HALVES(v)                                                                                  \
    (__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +                                       \
     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15))
    Eight a8 = HALVES(a), b8 = HALVES(b), c8 = HALVES(c), d8 = HALVES(d);
#else
    Eight a8 = a, b8 = b, c8 = c, d8 = d;
#endif
    Eight ab = __builtin_shufflevector(a8, b8, 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(a8, b8, 2, 10, 3, 11, 6, 14, 7, 15);
    Eight cd = __builtin_shufflevector(c8, d8, 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(c8, d8, 2, 10, 3, 11, 6, 14, 7, 15);
    Eight all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(all, all, 0, 1, 2, 3) +
           __builtin_shufflevector(all, all, 4, 5, 6, 7);
#endif
}

INLINE float sum(Vector v) {
    Vector none = {0};
    return sum_lanes(v, none, none, none)[0];
}

/* e to the power of x, with a relative error of about 1e-7; 0 below -87.3. */
INLINE Vector exponential(Vector x) {
    const Vector low = spread(-87.3f), high = spread(88.3f), shift = spread(12582912.0f);
    Vector original = x;
    Integers is_low = x < low, is_high = x > high;
    x = (Vector)((is_low & (Integers)low) | (~is_low & (Integers)x));
    x = (Vector)((is_high & (Integers)high) | (~is_high & (Integers)x));
    Vector shifted = fuse(x, spread(1.44269504088896341f), shift);
    Integers power = (Integers)shifted - (Integers)shift;
    Vector n = shifted - shift;
    Vector r = fuse(n, spread(-0.693359375f), x);
    r = fuse(n, spread(2.12194440e-4f), r);
    Vector p = fuse(r, spread(1.9875691500e-4f), spread(1.3981999507e-3f));
    p = fuse(p, r, spread(8.3334519073e-3f));
    p = fuse(p, r, spread(4.1665795894e-2f));
    p = fuse(p, r, spread(1.6666665459e-1f));
    p = fuse(p, r, spread(5.0000001201e-1f));
    p = fuse(p, r * r, r) + 1.0f;
    Vector result = (Vector)((Integers)p + (power << 23));
    Integers is_number = original == original;
    return (Vector)((~is_low & is_number & (Integers)result) | (~is_number & (Integers)original));
}

/* Sums of products of `rows` rows of x and four rows of weights, for the rows in `y`. `add`: add
   to y. The weights beyond `valid` are read from the last valid row, and their sums dropped. The
   weights `ahead` floats further on are fetched into the second-level cache, unless it is 0. */
INLINE void multiply_tile(const int rows, const float *x, int64_t x_stride, const float *weight,
                          int64_t weight_stride, int64_t depth, float *y, int64_t y_stride,
                          int64_t valid, const float *bias, int add, int64_t ahead) {
    const float *w0 = weight;
    const float *w1 = weight + (valid > 1 ? 1 : 0) * weight_stride;
    const float *w2 = weight + (valid > 2 ? 2 : 0) * weight_stride;
    const float *w3 = weight + (valid > 3 ? 3 : 0) * weight_stride;
    Vector sums[TILE_ROWS][TILE_COLUMNS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < TILE_COLUMNS; j++) sums[i][j] = (Vector){0};
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
        Vector v[TILE_ROWS];
        if (ahead && k % LINE == 0) {
            __builtin_prefetch(w0 + ahead + k, 0, 2);
            __builtin_prefetch(w1 + ahead + k, 0, 2);
            __builtin_prefetch(w2 + ahead + k, 0, 2);
            __builtin_prefetch(w3 + ahead + k, 0, 2);
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            v[i] = load(x + i * x_stride + k);
            KEEP(v[i]);
        }
#define COLUMN(j)                                                                                  \
    {                                                                                              \
        Vector w = load(w##j + k);                                                                 \
        KEEP(w);                                                                                   \
        _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) sums[i][j] =                        \
            fuse(v[i], w, sums[i][j]);                                                             \
    }
        COLUMN(0)
        COLUMN(1)
        COLUMN(2)
        COLUMN(3)
#undef COLUMN
    }
    if (k < depth) {
        int64_t left = depth - k;
        Vector a = load_some(w0 + k, left), b = load_some(w1 + k, left);
        Vector c = load_some(w2 + k, left), d = load_some(w3 + k, left);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            Vector v = load_some(x + i * x_stride + k, left);
            sums[i][0] = fuse(v, a, sums[i][0]);
            sums[i][1] = fuse(v, b, sums[i][1]);
            sums[i][2] = fuse(v, c, sums[i][2]);
            sums[i][3] = fuse(v, d, sums[i][3]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        Four total = sum_lanes(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        float *to = y + i * y_stride;
        if (valid == TILE_COLUMNS) {
            if (bias) total += *(const UnalignedFour *)bias;
            if (add) total += *(const UnalignedFour *)to;
            *(UnalignedFour *)to = total;
        } else {
            for (int64_t j = 0; j < valid; j++) {
                float value = total[j];
                if (bias) value += bias[j];
                if (add) value += to[j];
                to[j] = value;
            }
        }
    }
}

/* Products of `rows` rows of x (rows, depth) and the weights (first to end, depth), for `y` (rows,
   all weights), to which they are added if `add`. */
static void multiply(const float *x, int64_t x_stride, int64_t rows, const float *weight,
                     int64_t weight_stride, int64_t first, int64_t end, int64_t depth, float *y,
                     int64_t y_stride, const float *bias, int add) {
    int64_t parts = (depth + DEPTH - 1) / DEPTH;
    int64_t size = ((depth + parts - 1) / parts + LINE - 1) / LINE * LINE;
    for (int64_t from = 0; from < depth; from += size) {
        int64_t part = MIN(size, depth - from);
        int64_t block = MAX(BLOCK / part / TILE_COLUMNS * TILE_COLUMNS, TILE_COLUMNS);
        int adds = add || from > 0;
        const float *offset = from > 0 ? 0 : bias;
        for (int64_t begin = first; begin < end; begin += block) {
            int64_t stop = MIN(begin + block, end);
            for (int64_t i = 0; i < rows;) {
                int64_t left = rows - i;
                /* The last four rows are two tiles of two: a tile of one row is slow. */
                int64_t height = left == TILE_ROWS + 1 ? left / 2 : MIN(left, TILE_ROWS);
                for (int64_t j = begin; j < stop; j += TILE_COLUMNS) {
                    const float *xs = x + i * x_stride + from;
                    const float *ws = weight + j * weight_stride + from;
                    const float *b = offset ? offset + j : 0;
                    float *ys = y + i * y_stride + j;
                    int64_t valid = MIN(TILE_COLUMNS, stop - j);
                    int64_t ahead =
                        i == 0 && stop + AHEAD * block <= end ? AHEAD * block * weight_stride : 0;
#define TILE(n)                                                                                    \
    multiply_tile(n, xs, x_stride, ws, weight_stride, part, ys, y_stride, valid, b, adds, ahead)
                    if (height == TILE_ROWS)
                        TILE(TILE_ROWS);
#if TILE_ROWS > 3
                    else if (height == 3)
                        TILE(3);
#endif
                    else if (height == 2)
                        TILE(2);
                    else
                        TILE(1);
#undef TILE
                }
                i += height;
            }
        }
    }
}

/* Scores of `rows` queries with `count` keys, (count, dim) each. */
INLINE void score_tile(const int rows, const float *query, const float *key, int64_t count,
                       const int64_t dim, float *score, int64_t stride) {
    for (int64_t t = 0; t < count; t += 4) {
        int64_t left = count - t;
        const float *k0 = key + t * dim;
        const float *k1 = left > 1 ? k0 + dim : k0;
        const float *k2 = left > 2 ? k1 + dim : k0;
        const float *k3 = left > 3 ? k2 + dim : k0;
        Vector sums[3][4];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
            for (int j = 0; j < 4; j++) sums[i][j] = (Vector){0};
        int64_t k = 0;
#pragma GCC unroll 16
        for (; k + LANES <= dim; k += LANES) {
            Vector q[3];
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                q[i] = load(query + i * dim + k);
                KEEP(q[i]);
            }
#define COLUMN(j)                                                                                  \
    {                                                                                              \
        Vector v = load(k##j + k);                                                                 \
        KEEP(v);                                                                                   \
        _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++) sums[i][j] =                        \
            fuse(q[i], v, sums[i][j]);                                                             \
    }
            COLUMN(0)
            COLUMN(1)
            COLUMN(2)
            COLUMN(3)
#undef COLUMN
        }
        if (k < dim) {
            int64_t rest = dim - k;
            Vector a = load_some(k0 + k, rest), b = load_some(k1 + k, rest);
            Vector c = load_some(k2 + k, rest), d = load_some(k3 + k, rest);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                Vector q = load_some(query + i * dim + k, rest);
                sums[i][0] = fuse(q, a, sums[i][0]);
                sums[i][1] = fuse(q, b, sums[i][1]);
                sums[i][2] = fuse(q, c, sums[i][2]);
                sums[i][3] = fuse(q, d, sums[i][3]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            Four total = sum_lanes(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
            float *to = score + i * stride + t;
            if (left >= 4)
                *(UnalignedFour *)to = total;
            else
                for (int64_t j = 0; j < left; j++) to[j] = total[j];
        }
    }
}

INLINE void score_rows(const float *query, int64_t rows, const float *key, int64_t count,
                       const int64_t dim, float *score, int64_t stride) {
    int64_t block = MAX(BLOCK / dim / 4 * 4, 4);
    for (int64_t begin = 0; begin < count; begin += block) {
        int64_t size = MIN(block, count - begin);
        int64_t i = 0;
#define ROWS(n)                                                                                    \
    score_tile(n, query + i * dim, key + begin * dim, size, dim, score + i * stride + begin, stride)
        for (; i + 3 <= rows; i += 3) ROWS(3);
        if (rows - i == 2)
            ROWS(2);
        else if (rows - i == 1)
            ROWS(1);
#undef ROWS
    }
}

/* Scores of queries (rows, dim) with keys (count, dim), (rows, stride). */
static void score(const float *query, int64_t rows, const float *key, int64_t count, int64_t dim,
                  float *to, int64_t stride) {
    if (dim == 32)
        score_rows(query, rows, key, count, 32, to, stride);
    else if (dim == 64)
        score_rows(query, rows, key, count, 64, to, stride);
    else if (dim == 128)
        score_rows(query, rows, key, count, 128, to, stride);
    else
        score_rows(query, rows, key, count, dim, to, stride);
}

INLINE void fetch(const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += LINE) __builtin_prefetch(from + i);
}

/* Sums of `rows` vectors of weights (stride in floats) times `count` values (count, dim), added to
   the rows of y, in the order of the values. */
INLINE void mix_tile(const int rows, const int vectors, const float *weight, int64_t weight_stride,
                     const float *value, int64_t count, int64_t dim, float *y) {
    Vector sums[3][4];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) sums[i][j] = load(y + i * dim + j * LANES);
    for (int64_t t = 0; t < count; t++) {
        Vector w[3];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            w[i] = spread(weight[i * weight_stride + t]);
            KEEP(w[i]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            Vector v = load(value + t * dim + j * LANES);
            KEEP(v);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sums[i][j] = fuse(w[i], v, sums[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) store(y + i * dim + j * LANES, sums[i][j]);
}

INLINE void mix_rows(const int rows, const float *weight, int64_t weight_stride, const float *value,
                     int64_t count, int64_t dim, float *y) {
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES)
        mix_tile(rows, 4, weight, weight_stride, value + at, count, dim, y + at);
    for (; at + 2 * LANES <= dim; at += 2 * LANES)
        mix_tile(rows, 2, weight, weight_stride, value + at, count, dim, y + at);
    for (; at + LANES <= dim; at += LANES)
        mix_tile(rows, 1, weight, weight_stride, value + at, count, dim, y + at);
    if (at < dim)
        for (int i = 0; i < rows; i++) {
            Vector total = load_some(y + i * dim + at, dim - at);
            for (int64_t t = 0; t < count; t++)
                total = fuse(spread(weight[i * weight_stride + t]),
                             load_some(value + t * dim + at, dim - at), total);
            store_some(y + i * dim + at, total, dim - at);
        }
}

static void mix(const float *weight, int64_t weight_stride, int64_t rows, const float *value,
                int64_t count, int64_t dim, float *y) {
    int64_t block = MAX(2 * BLOCK / dim, 1);
    for (int64_t begin = 0; begin < count; begin += block) {
        int64_t size = MIN(block, count - begin);
        int64_t i = 0;
#define ROWS(n)                                                                                    \
    mix_rows(n, weight + i * weight_stride + begin, weight_stride, value + begin * dim, size, dim, \
             y + i * dim)
        for (; i + 3 <= rows; i += 3) ROWS(3);
        if (rows - i == 2)
            ROWS(2);
        else if (rows - i == 1)
            ROWS(1);
#undef ROWS
    }
}

static void normalise(const float *x, const float *weight, float eps, int64_t size, float *y) {
    Vector squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = fuse(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < size; i++) y[i] = x[i] * scale * weight[i];
}

static void rotate(float *x, const float *cosine, const float *sine, int64_t dim) {
    int64_t half = dim / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        Vector a = load(x + i), b = load(x + half + i);
        store(x + i, fuse(a, load(cosine + i), b * load(sine + i)));
        store(x + half + i, fuse(b, load(cosine + half + i), a * load(sine + half + i)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] + b * sine[i];
        x[half + i] = b * cosine[half + i] + a * sine[half + i];
    }
}

/* gate = silu(gate) * up. */
static void activate(float *gate, const float *up, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vector g = load(gate + i);
        store(gate + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    for (; i < size; i++) {
        float g = gate[i];
        gate[i] = g / (1.0f + exponential(spread(-g))[0]) * up[i];
    }
}

INLINE Vector larger(Vector a, Vector b) {
    Integers first = a > b;
    return (Vector)((first & (Integers)a) | (~first & (Integers)b));
}

static float maximum(const float *x, int64_t size) {
    float most = -INFINITY;
    int64_t i = 0;
    if (size >= LANES) {
        Vector best = load(x);
        for (i = LANES; i + LANES <= size; i += LANES) best = larger(best, load(x + i));
        for (int lane = 0; lane < LANES; lane++)
            if (best[lane] > most) most = best[lane];
    }
    for (; i < size; i++)
        if (x[i] > most) most = x[i];
    return most;
}

/* Write e to the power of x - offset to y; return the sum. */
static float exponentiate(const float *x, float offset, int64_t size, float *y) {
    Vector total = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        Vector e = exponential(load(x + i) - offset);
        store(y + i, e);
        total += e;
    }
    float result = sum(total);
    for (; i < size; i++) {
        y[i] = exponential(spread(x[i] - offset))[0];
        result += y[i];
    }
    return result;
}

/* First column in which two rows of cached tokens differ, at most `limit`. */
static int64_t common_columns(const int64_t *a, const int64_t *b, int64_t limit) {
    int64_t i = 0;
    while (i < limit && a[i] == b[i]) i++;
    return i;
}

/* Number of tokens from `at` on that attend together, and the columns of the first one's row that
   they have in common. */
static int64_t find_block(const struct part *part, int64_t at, int64_t *shared) {
    const struct pass *pass = part->pass;
    int64_t end = part->first + part->tokens;
    int64_t size = 1;
    *shared = pass->column[at] + 1;
    if (at >= pass->decoding) {
        while (size < PIECE_TOKENS && at + size < end && pass->start[at + size] == pass->start[at])
            size++;
        return size;
    }
    const int64_t *leader = pass->cached + pass->row[at] * pass->cached_columns;
    int64_t common = pass->column[at];
    while (size < BLOCK_TOKENS && at + size < MIN(end, pass->decoding)) {
        int64_t limit = MIN(common, pass->column[at + size]);
        const int64_t *row = pass->cached + pass->row[at + size] * pass->cached_columns;
        int64_t found = common_columns(leader, row, limit);
        if (found < MIN_SHARED || (size > 1 && found < common - common / 4)) break;
        common = found;
        size++;
    }
    if (size > 1) *shared = common;
    return size;
}

/* Attention of `size` tokens from `at` on with one head of keys. */
static void attend(const struct part *part, const struct layer *layer, int64_t at, int64_t size,
                   int64_t shared, int64_t head) {
    const struct model *model = part->model;
    const struct pass *pass = part->pass;
    int64_t dim = model->dim, group = model->heads / model->kv_heads;
    int64_t stride = pass->width, rows = size * group;
    int64_t row_size = model->columns * dim;
    float *scores = part->scores, *packed = part->packed, *gathered = part->gathered;
#define HEAD_OF(token) ((pass->row[token] * model->kv_heads + head) * row_size)
    for (int64_t i = 0; i < size; i++) {
        const float *query =
            part->query + ((at - part->first + i) * model->heads + head * group) * dim;
        float *to = packed + i * group * dim;
        for (int64_t k = 0; k < group * dim; k++) to[k] = query[k] * layer->scale;
    }
    memset(gathered, 0, sizeof(float) * rows * dim);
#define OWN(token) (pass->column[token] + 1 - shared)
    score(packed, rows, layer->keys + HEAD_OF(at), shared, dim, scores, stride);
    for (int64_t i = 0; i < size; i++) {
        /* The memory of each row is elsewhere: it is fetched while the row before is computed. */
        if (i + 1 < size)
            fetch(layer->keys + HEAD_OF(at + i + 1) + shared * dim, OWN(at + i + 1) * dim);
        if (OWN(at + i) > 0) {
            fetch(layer->values + HEAD_OF(at + i) + shared * dim, OWN(at + i) * dim);
            score(packed + i * group * dim, group, layer->keys + HEAD_OF(at + i) + shared * dim,
                  OWN(at + i), dim, scores + i * group * stride + shared, stride);
        }
    }
    float total[rows];
    for (int64_t i = 0; i < rows; i++) {
        int64_t width = pass->column[at + i / group] + 1;
        float *row = scores + i * stride;
        total[i] = exponentiate(row, maximum(row, width), width, row);
    }
    mix(scores, stride, rows, layer->values + HEAD_OF(at), shared, dim, gathered);
    for (int64_t i = 0; i < size; i++) {
        if (OWN(at + i) > 0)
            mix(scores + i * group * stride + shared, stride, group,
                layer->values + HEAD_OF(at + i) + shared * dim, OWN(at + i), dim,
                gathered + i * group * dim);
    }
#undef OWN
#undef HEAD_OF
    for (int64_t i = 0; i < rows; i++) {
        float scale = 1.0f / total[i];
        float *to = part->mixed +
                    ((at - part->first + i / group) * model->heads + head * group + i % group) * dim;
        for (int64_t k = 0; k < dim; k++) to[k] = gathered[i * dim + k] * scale;
    }
}

INLINE void wait_for_others(const struct part *part) {
    if (part->members > 1) part->pass->barrier();
}

/* Share of `count` that a member computes, in multiples of `unit`. */
INLINE void share(const struct part *part, int64_t count, int64_t unit, int64_t *first,
                  int64_t *end) {
    int64_t units = (count + unit - 1) / unit;
    *first = MIN(units * part->number / part->members * unit, count);
    *end = MIN(units * (part->number + 1) / part->members * unit, count);
}

/* Product of all tokens of a part with this member's share of the rows of a weight. */
static void project(const struct part *part, const float *x, int64_t rows, int64_t depth,
                    const float *weight, const float *bias, int64_t width, float *y, int add) {
    int64_t first, end;
    share(part, width, TILE_COLUMNS, &first, &end);
    multiply(x, depth, rows, weight, depth, first, end, depth, y, width, bias, add);
}

static void run_layer(const struct part *part, const struct layer *layer) {
    const struct model *model = part->model;
    const struct pass *pass = part->pass;
    int64_t hidden = model->hidden, inner = model->intermediate, dim = model->dim;
    int64_t heads = model->heads, kv_heads = model->kv_heads, tokens = part->tokens;
    int64_t first, end;
    share(part, tokens, 1, &first, &end);
    for (int64_t i = first; i < end; i++)
        normalise(part->x + i * hidden, layer->attention_norm, layer->attention_eps, hidden,
                  part->normed + i * hidden);
    wait_for_others(part);
    project(part, part->normed, tokens, hidden, layer->query, layer->query_bias, heads * dim,
            part->query, 0);
    project(part, part->normed, tokens, hidden, layer->key, layer->key_bias, kv_heads * dim,
            part->key, 0);
    project(part, part->normed, tokens, hidden, layer->value, layer->value_bias, kv_heads * dim,
            part->value, 0);
    wait_for_others(part);
    for (int64_t i = first; i < end; i++) {
        int64_t column = pass->column[part->first + i], row = pass->row[part->first + i];
        const float *cosine = model->cosine + column * dim, *sine = model->sine + column * dim;
        for (int64_t head = 0; head < heads; head++) {
            float *query = part->query + (i * heads + head) * dim;
            if (layer->query_norm) normalise(query, layer->query_norm, layer->query_eps, dim, query);
            rotate(query, cosine, sine, dim);
        }
        for (int64_t head = 0; head < kv_heads; head++) {
            float *key = part->key + (i * kv_heads + head) * dim;
            int64_t place = ((row * kv_heads + head) * model->columns + column) * dim;
            if (layer->key_norm) normalise(key, layer->key_norm, layer->key_eps, dim, key);
            rotate(key, cosine, sine, dim);
            memcpy(layer->keys + place, key, sizeof(float) * dim);
            memcpy(layer->values + place, part->value + (i * kv_heads + head) * dim,
                   sizeof(float) * dim);
        }
    }
    wait_for_others(part);
    int64_t item = 0;
    for (int64_t i = 0; i < tokens; i += part->size[i])
        for (int64_t head = 0; head < kv_heads; head++)
            if (item++ % part->members == part->number)
                attend(part, layer, part->first + i, part->size[i], part->shared[i], head);
    wait_for_others(part);
    project(part, part->mixed, tokens, heads * dim, layer->out, layer->out_bias, hidden, part->x, 1);
    wait_for_others(part);
    for (int64_t i = first; i < end; i++)
        normalise(part->x + i * hidden, layer->mlp_norm, layer->mlp_eps, hidden,
                  part->normed + i * hidden);
    wait_for_others(part);
    project(part, part->normed, tokens, hidden, layer->gate, layer->gate_bias, inner, part->gate, 0);
    project(part, part->normed, tokens, hidden, layer->up, layer->up_bias, inner, part->up, 0);
    share(part, inner, TILE_COLUMNS, &first, &end);
    for (int64_t i = 0; i < tokens; i++)
        activate(part->gate + i * inner + first, part->up + i * inner + first, end - first);
    wait_for_others(part);
    project(part, part->gate, tokens, inner, layer->down, layer->down_bias, hidden, part->x, 1);
    wait_for_others(part);
}

static void run_part(const struct part *part) {
    const struct model *model = part->model;
    const struct pass *pass = part->pass;
    int64_t hidden = model->hidden, first, end;
    if (part->number == 0)
        for (int64_t i = 0; i < part->tokens; i += part->size[i])
            part->size[i] = find_block(part, part->first + i, part->shared + i);
    share(part, part->tokens, 1, &first, &end);
    for (int64_t i = first; i < end; i++)
        memcpy(part->x + i * hidden, model->embedding + pass->token[part->first + i] * hidden,
               sizeof(float) * hidden);
    for (int64_t i = 0; i < model->layers; i++) run_layer(part, model->layer + i);
    share(part, part->outputs, 1, &first, &end);
    for (int64_t i = first; i < end; i++)
        normalise(part->x + (pass->output[part->first_output + i] - part->first) * hidden,
                  model->norm, model->norm_eps, hidden, part->normed + i * hidden);
    wait_for_others(part);
    project(part, part->normed, part->outputs, hidden, model->head, model->head_bias,
            model->vocabulary, pass->logits + part->first_output * model->vocabulary, 0);
}

static int64_t token_floats(const struct model *model) {
    return 2 * model->hidden + 2 * (model->heads + model->kv_heads) * model->dim +
           2 * model->intermediate;
}

static int64_t thread_floats(const struct model *model, const struct pass *pass) {
    int64_t rows = BLOCK_TOKENS * (model->heads / model->kv_heads);
    return rows * (pass->width + 2 * model->dim);
}

/* Floats of workspace that `run_pass` needs. */
int64_t workspace_floats(const struct model *model, const struct pass *pass) {
    return pass->tokens * token_floats(model) + pass->threads * thread_floats(model, pass);
}

struct call {
    const struct model *model;
    const struct pass *pass;
};

static void run_thread(void *argument) {
    const struct call *call = argument;
    const struct model *model = call->model;
    const struct pass *pass = call->pass;
    int64_t number = pass->threads > 1 ? pass->thread_number() : 0;
    int64_t members = pass->threads > 1 ? pass->thread_count() : 1;
    struct part part = {.model = model, .pass = pass};
    if (pass->by_rows) {
        part.members = 1;
        part.first = part.first_output = pass->tokens * number / members;
        part.tokens = part.outputs = pass->tokens * (number + 1) / members - part.first;
    } else {
        part.number = number;
        part.members = members;
        part.tokens = pass->tokens;
        part.outputs = pass->outputs;
    }
    part.size = pass->blocks + part.first;
    part.shared = pass->blocks + pass->tokens + part.first;
    float *at = pass->workspace + part.first * token_floats(model);
#define TAKE(name, size)                                                                           \
    part.name = at;                                                                                \
    at += part.tokens * (size)
    TAKE(x, model->hidden);
    TAKE(normed, model->hidden);
    TAKE(query, model->heads * model->dim);
    TAKE(mixed, model->heads * model->dim);
    TAKE(key, model->kv_heads * model->dim);
    TAKE(value, model->kv_heads * model->dim);
    TAKE(gate, model->intermediate);
    TAKE(up, model->intermediate);
#undef TAKE
    at = pass->workspace + pass->tokens * token_floats(model) + number * thread_floats(model, pass);
    int64_t rows = BLOCK_TOKENS * (model->heads / model->kv_heads);
    part.packed = at;
    part.gathered = at + rows * model->dim;
    part.scores = at + 2 * rows * model->dim;
    if (part.tokens) run_part(&part);
}

/* First token of a pass that is not in the embedding, or whose place is not in the cache or in the
   table of cached tokens; -1 if there is none. */
static int64_t find_outside(const struct model *model, const struct pass *pass) {
    for (int64_t i = 0; i < pass->tokens; i++) {
        int decodes = i < pass->decoding;
        int64_t rows = decodes ? MIN(model->rows, pass->cached_rows) : model->rows;
        int64_t columns = decodes ? MIN(model->columns, pass->cached_columns) : model->columns;
        columns = MIN(columns, pass->width);
        if (pass->token[i] < 0 || pass->token[i] >= model->embeddings || pass->row[i] < 0 ||
            pass->row[i] >= rows || pass->column[i] < 0 || pass->column[i] >= columns)
            return i;
    }
    return -1;
}

/* Compute a pass. Returns -1, or without computing anything the first token that is outside. */
int64_t run_pass(const struct model *model, const struct pass *pass) {
    int64_t outside = find_outside(model, pass);
    if (outside >= 0) return outside;
    struct call call = {model, pass};
    if (pass->threads > 1)
        pass->parallel(run_thread, &call, (unsigned)pass->threads, 0);
    else
        run_thread(&call);
    return -1;
}

/* Sample one token of each row of logits (rows, vocabulary) by its uniform number; write the tokens
   and their log-probabilities under the softmax of the logits divided by `temperature`. The
   log-probability is not finite if a logit is NaN or infinite. `numbers` and `sums` are workspace for
   `vocabulary` numbers and one sum of each 64 of them. */
void sample_rows(const float *logits, int64_t rows, int64_t vocabulary, float temperature,
                 const double *uniform, float *numbers, double *sums, int64_t *token,
                 float *logprob) {
    /* Sums of 64 numbers each: the draw is first looked for among them. */
    enum { RUN = 64 };
    int64_t runs = (vocabulary + RUN - 1) / RUN;
    for (int64_t i = 0; i < rows; i++) {
        const float *row = logits + i * vocabulary;
        if (temperature != 1.0f) {
            for (int64_t k = 0; k < vocabulary; k++) numbers[k] = row[k] / temperature;
            row = numbers;
        }
        exponentiate(row, maximum(row, vocabulary), vocabulary, numbers);
        double total = 0.0;
        for (int64_t run = 0; run < runs; run++) {
            double part[4] = {0.0};
            int64_t end = MIN((run + 1) * RUN, vocabulary), k = run * RUN;
            for (; k + 4 <= end; k += 4)
                for (int lane = 0; lane < 4; lane++) part[lane] += numbers[k + lane];
            for (; k < end; k++) part[0] += numbers[k];
            total += sums[run] = (part[0] + part[1]) + (part[2] + part[3]);
        }
        double draw = uniform[i] * total, before = 0.0;
        int64_t run = 0, last = -1;
        while (run < runs - 1 && !(before + sums[run] > draw)) before += sums[run++];
        int64_t k = run * RUN;
        for (; k < vocabulary; k++) {
            if (numbers[k] > 0.0f) last = k;
            before += numbers[k];
            if (before > draw) break;
        }
        /* Rounding may leave the last number out. */
        if (k == vocabulary) k = last < 0 ? vocabulary - 1 : last;
        token[i] = k;
        logprob[i] = (float)log((double)numbers[k] / total);
    }
}
