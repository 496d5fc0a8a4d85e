/* 4-bit weights times bf16 tokens on CPUs with AVX512-BF16.

   Up to FEW tokens: a dot along K a row, products of bf16 tokens with the exact integers code - zero, the scale of a
   block applied to its float32 sums. More tokens: blocks of rows are widened to bf16 (rounded once) into the cache, and
   a lane holds a token: 12 rows by 32 tokens are summed in registers. Sums are float32 throughout. */

#include "native.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct {
    const Matrix *matrix;
    const uint16_t *x; /* few: rows of `stride` values; many: packed panels */
    const uint16_t *shadow_x;
    int64_t tokens, stride, first, last, out_stride;
    void *out;
    int32_t out_kind;
} Job;

static uint16_t INTEGERS[16][32] ALIGNED; /* bf16 of code - zero, by zero */
static float FLOATS[16][16] ALIGNED;      /* the same in float32 */

__attribute__((constructor)) static void fill_integers(void) {
    for (int zero = 0; zero < 16; zero++)
        for (int code = 0; code < 32; code++) {
            FLOATS[zero][code & 15] = (float)((code & 15) - zero);
            INTEGERS[zero][code] = float_to_bf16((float)((code & 15) - zero));
        }
}

static __thread void *kept[BUFFERS];
static __thread int64_t sizes[BUFFERS];

void *glm5_scratch(int64_t bytes, int which) {
    if (sizes[which] < bytes || !kept[which]) {
        free(kept[which]);
        kept[which] = aligned_alloc(64, (size_t)((bytes + 127) / 64 * 64));
        sizes[which] = kept[which] ? bytes : 0;
    }
    return kept[which];
}

static void release(void) {
    for (int i = 0; i < BUFFERS; i++) {
        free(kept[i]);
        kept[i] = NULL, sizes[i] = 0;
    }
}

INLINE float widen(const void *values, int64_t i, int kind) {
    if (kind == BF16) return bf16_to_float(((const uint16_t *)values)[i]);
    if (kind == F16) return _cvtsh_ss(((const uint16_t *)values)[i]);
    if (kind == F32) return ((const float *)values)[i];
    return (float)((const int8_t *)values)[i];
}

INLINE int64_t blocks_of(const Matrix *m) { return (m->k + GROUP - 1) / GROUP; }
INLINE int64_t bytes_of(const Matrix *m) { return (m->k + 2 * GROUP - 1) / (2 * GROUP) * GROUP; }

/* count float32 scales from position `at` on; a multiple of 16 is written */
INLINE void widen_scales(const Matrix *m, int64_t at, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i += LANES) {
        const __mmask16 mask = lanes(count - i);
        __m512 values;
        if (m->scale_kind == F32) values = _mm512_maskz_loadu_ps(mask, (const float *)m->scale + at + i);
        else {
            const __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)m->scale + at + i);
            values = m->scale_kind == F16 ? _mm512_cvtph_ps(half)
                                          : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        }
        _mm512_storeu_ps(out + i, values);
    }
}

/* ---- few tokens ---- */

INLINE __m512bh words(__m256i bytes, __m512i table) {
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(bytes), table);
}

INLINE void few_block(__m512i plane, const uint16_t *table, float scale, const uint16_t *x, int64_t stride, int count,
                      __m512 *sum) {
    const __m512i integers = _mm512_load_si512(table);
    const __m512bh low = words(_mm512_castsi512_si256(plane), integers);
    const __m512bh high = words(_mm512_extracti64x4_epi64(plane, 1), integers);
    const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 8
    for (int t = 0; t < count; t++) {
        const uint16_t *row = x + t * stride;
        __m512 dot = _mm512_dpbf16_ps(_mm512_setzero_ps(), low, (__m512bh)_mm512_loadu_si512(row));
        dot = _mm512_dpbf16_ps(dot, high, (__m512bh)_mm512_loadu_si512(row + 32));
        sum[t] = _mm512_fmadd_ps(dot, factor, sum[t]);
    }
}

INLINE void few_rows(const Job *job, int64_t row, int rows, int count, const float *scale, float *out, int64_t width) {
    const Matrix *m = job->matrix;
    const int64_t blocks = blocks_of(m), bytes = bytes_of(m);
    const __m512i mask = _mm512_set1_epi8(15);
    __m512 sum[4][FEW];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int t = 0; t < count; t++) sum[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b += 2) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const uint8_t *zero = m->zero + (row + r) * blocks + b;
            const float *factor = scale + r * blocks + b;
            const uint8_t *from = m->codes + (row + r) * bytes + b * (GROUP / 2);
            const __m512i both = _mm512_loadu_si512(from);
            if (row + r + rows < m->n) _mm_prefetch(from + rows * bytes, _MM_HINT_T0);
            few_block(_mm512_and_si512(both, mask), INTEGERS[zero[0] & 15], factor[0], job->x + b * GROUP, job->stride,
                      count, sum[r]);
            if (b + 1 < blocks)
                few_block(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), INTEGERS[zero[1] & 15], factor[1],
                          job->x + (b + 1) * GROUP, job->stride, count, sum[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int t = 0; t < count; t++) out[t * width + r] = _mm512_reduce_add_ps(sum[r][t]);
}

static void few_any(const Job *job, int64_t row, int rows, const float *scale, float *out, int64_t width) {
    const int count = (int)job->tokens;
#define CASE(rows_, count_) \
    case count_: few_rows(job, row, rows_, count_, scale, out, width); break;
    if (rows == 4) switch (count) { CASE(4, 1) CASE(4, 2) CASE(4, 3) CASE(4, 4) }
    else if (rows == 2) switch (count) { CASE(2, 5) CASE(2, 6) CASE(2, 7) CASE(2, 8) }
    else switch (count) { CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(1, 5) CASE(1, 6) CASE(1, 7) CASE(1, 8) }
#undef CASE
}

INLINE void add_column(float *out, int64_t count, float x, const void *residual, int64_t at, int kind) {
    for (int64_t i = 0; i < count; i++) out[i] += x * widen(residual, at + i, kind);
}

static void add_shadow(const Job *job, int64_t token, float *out) {
    const Matrix *m = job->matrix;
    const int64_t count = job->last - job->first;
    for (int64_t c = 0; c < m->count; c++) {
        const float factor = m->residual_scale ? m->residual_scale[c] : 1;
        const float x = factor * bf16_to_float(job->x[token * job->stride + m->columns[c]]);
        const int64_t at = c * m->n + job->first;
        if (m->residual_kind == BF16) add_column(out, count, x, m->residual, at, BF16);
        else if (m->residual_kind == F16) add_column(out, count, x, m->residual, at, F16);
        else if (m->residual_kind == F32) add_column(out, count, x, m->residual, at, F32);
        else add_column(out, count, x, m->residual, at, I8);
    }
}

static void store(const Job *job, int64_t token, int64_t first, const float *values, int64_t count) {
    const int64_t at = token * job->out_stride + first;
    if (job->out_kind == F32) memcpy((float *)job->out + at, values, (size_t)count * 4);
    else for (int64_t i = 0; i < count; i += LANES) {
        const __mmask16 mask = lanes(count - i);
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, values + i));
        _mm256_mask_storeu_epi16((uint16_t *)job->out + at + i, mask, rounded);
    }
}

static int few(const Job *job) {
    const Matrix *m = job->matrix;
    const int64_t width = job->last - job->first, blocks = blocks_of(m);
    const int most = job->tokens <= 4 ? 4 : 2;
    float *out = glm5_scratch(job->tokens * width * 4, 0), *scale = glm5_scratch((4 * blocks + LANES) * 4, 1);
    if (!out || !scale) return 1;
    for (int64_t row = job->first, rows; row < job->last; row += rows) {
        rows = job->last - row >= most ? most : 1;
        widen_scales(m, row * blocks, rows * blocks, scale);
        few_any(job, row, (int)rows, scale, out + (row - job->first), width);
    }
    for (int64_t t = 0; t < job->tokens; t++) {
        add_shadow(job, t, out + t * width);
        store(job, t, job->first, out + t * width, width);
    }
    return 0;
}

/* ---- many tokens ---- */

INLINE void transpose(__m512i v[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(v[i + j], v[i + 4 + j], 0x88);
            t[i + 4 + j] = _mm512_shuffle_i32x4(v[i + j], v[i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    }
}

/* panels of 16 tokens: [panel][width / 2][16 tokens][2]; what is missing is zero */
static void pack_panels(const uint16_t *x, int64_t tokens, int64_t stride, int64_t k, int64_t width, uint16_t *out) {
    for (int64_t first = 0; first < tokens; first += LANES, out += width * LANES)
        for (int64_t at = 0; at < width; at += 32) {
            const int64_t left = k - at;
            const __mmask32 mask = left >= 32 ? 0xffffffff : left > 0 ? (__mmask32)((1ull << left) - 1) : 0;
            __m512i rows[16];
            for (int r = 0; r < 16; r++)
                rows[r] = first + r < tokens ? _mm512_maskz_loadu_epi16(mask, x + (first + r) * stride + at)
                                             : _mm512_setzero_si512();
            transpose(rows);
            for (int r = 0; r < 16 && at + 2 * r < width; r++) _mm512_store_si512(out + (at + 2 * r) * LANES, rows[r]);
        }
}

INLINE void widen_block(__m512i plane, float scale, uint8_t zero, uint16_t *out) {
    const __m512 values = _mm512_mul_ps(_mm512_load_ps(FLOATS[zero & 15]), _mm512_set1_ps(scale));
    const __m512i table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values));
    _mm512_store_si512(out, (__m512i)words(_mm512_castsi512_si256(plane), table));
    _mm512_store_si512(out + 32, (__m512i)words(_mm512_extracti64x4_epi64(plane, 1), table));
}

static __attribute__((noinline)) void widen_rows(const Matrix *m, int64_t first, int64_t rows, int64_t start,
                                                 int64_t stop, uint16_t *restrict out) {
    const int64_t blocks = blocks_of(m), bytes = bytes_of(m), count = stop - start;
    const __m512i mask = _mm512_set1_epi8(15);
    ALIGNED float scale[CHUNK / GROUP + LANES];
    const uint8_t *restrict codes = m->codes + first * bytes + start * (GROUP / 2);
    const uint8_t *restrict zero = m->zero + first * blocks + start;
    const uint8_t *last = m->codes + m->n * bytes - GROUP;
    for (int64_t row = 0; row < rows; row++, out += STRIDE, codes += bytes, zero += blocks) {
        widen_scales(m, (first + row) * blocks + start, count, scale);
        for (int64_t b = 0; b < count; b += 2) {
            const uint8_t *from = codes + b * (GROUP / 2), *soon = from + AHEAD * bytes;
            const __m512i both = _mm512_loadu_si512(from);
            _mm_prefetch(soon < last ? soon : last, _MM_HINT_T0);
            widen_block(_mm512_and_si512(both, mask), scale[b], zero[b], out + b * GROUP);
            if (b + 1 < count)
                widen_block(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), scale[b + 1], zero[b + 1],
                            out + (b + 1) * GROUP);
        }
    }
}

static void widen_shadow(const Matrix *m, int64_t first, int64_t rows, int64_t start, int64_t stop, uint16_t *out) {
    for (int64_t row = first; row < first + rows; row++, out += STRIDE) {
        for (int64_t c = start; c < stop; c++) {
            float value = widen(m->residual, c * m->n + row, m->residual_kind);
            if (m->residual_scale) value *= m->residual_scale[c];
            out[c - start] = float_to_bf16(value);
        }
        if ((stop - start) & 1) out[stop - start] = 0;
    }
}

INLINE void tile(const uint16_t *weights, const uint16_t *x, int64_t panel, int64_t pairs, int panels, int fresh,
                 float *sums) {
    __m512 sum[TILE][2];
#pragma GCC unroll 12
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            sum[r][p] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + (r * panels + p) * LANES);
    for (int64_t i = 0; i < pairs; i++) {
        const __m512bh one = (__m512bh)_mm512_load_si512(x + i * 2 * LANES);
        const __m512bh two = panels == 2 ? (__m512bh)_mm512_load_si512(x + panel + i * 2 * LANES) : one;
#pragma GCC unroll 12
        for (int r = 0; r < TILE; r++) {
            int32_t pair;
            memcpy(&pair, weights + r * STRIDE + 2 * i, 4);
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], weight, one);
            if (panels == 2) sum[r][1] = _mm512_dpbf16_ps(sum[r][1], weight, two);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) _mm512_store_ps(sums + (r * panels + p) * LANES, sum[r][p]);
}

/* all tokens with one chunk of some rows; sums: [panel pair][tile][12][2 or 1][16] */
static void chunk(const uint16_t *weights, int64_t high, int64_t rows, const uint16_t *x, int64_t panel, int64_t pairs,
                  int64_t panels, int fresh, float *sums) {
    for (int64_t p = 0; p < panels; p += 2)
        for (int64_t r = 0; r < rows; r += TILE) {
            const uint16_t *w = weights + r * STRIDE, *tokens = x + p * panel;
            float *to = sums + (p * high + r * (p + 2 <= panels ? 2 : 1)) * LANES;
            if (p + 2 <= panels && fresh) tile(w, tokens, panel, pairs, 2, 1, to);
            else if (p + 2 <= panels) tile(w, tokens, panel, pairs, 2, 0, to);
            else if (fresh) tile(w, tokens, panel, pairs, 1, 1, to);
            else tile(w, tokens, panel, pairs, 1, 0, to);
        }
}

static void store_sums(const Job *job, int64_t high, int64_t first, int64_t rows, int64_t panels, const float *sums) {
    for (int64_t p = 0; p < panels; p++) {
        const int64_t both = (p | 1) < panels ? 2 : 1;
        for (int64_t r = 0; r < rows; r += TILE) {
            const int64_t count = rows - r < TILE ? rows - r : TILE;
            __m512i v[16];
            for (int i = 0; i < 16; i++)
                v[i] = i < TILE ? _mm512_load_si512(sums + ((p & ~1ll) * high + (r + i) * both + (p & 1)) * LANES)
                                : _mm512_setzero_si512();
            transpose(v);
            for (int t = 0; t < LANES && p * LANES + t < job->tokens; t++) {
                ALIGNED float values[16];
                _mm512_store_si512(values, v[t]);
                store(job, p * LANES + t, first + r, values, count);
            }
        }
    }
}

static int many(const Job *job) {
    const Matrix *m = job->matrix;
    const int64_t blocks = blocks_of(m), panels = (job->tokens + LANES - 1) / LANES;
    const int64_t high = panels <= 2 ? SHORT : ROWS;
    const int64_t panel = blocks * GROUP * LANES, shadow_panel = (m->count + 1) / 2 * 2 * LANES;
    uint16_t *weights = glm5_scratch(high * STRIDE * 2, 0);
    float *sums = glm5_scratch(panels * high * LANES * 4, 1);
    if (!weights || !sums) return 1;
    for (int64_t row = job->first; row < job->last; row += high) {
        const int64_t rows = job->last - row < high ? job->last - row : high;
        const int64_t padded = (rows + TILE - 1) / TILE * TILE;
        memset(weights + rows * STRIDE, 0, (size_t)((padded - rows) * STRIDE * 2));
        for (int64_t b = 0; b < blocks; b += CHUNK / GROUP) {
            const int64_t stop = b + CHUNK / GROUP < blocks ? b + CHUNK / GROUP : blocks;
            widen_rows(m, row, rows, b, stop, weights);
            chunk(weights, high, padded, job->x + b * GROUP * LANES, panel, (stop - b) * GROUP / 2, panels, !b, sums);
        }
        for (int64_t c = 0; c < m->count; c += CHUNK) {
            const int64_t stop = c + CHUNK < m->count ? c + CHUNK : m->count;
            widen_shadow(m, row, rows, c, stop, weights);
            chunk(weights, high, padded, job->shadow_x + c * LANES, shadow_panel, (stop - c + 1) / 2, panels, 0, sums);
        }
        store_sums(job, high, row, rows, panels, sums);
    }
    return 0;
}

/* ---- calls ---- */

static int compute(const Job *job) { return job->tokens <= FEW ? few(job) : many(job); }

static void *thread(void *argument) {
    const int failed = compute(argument);
    release();
    return (void *)(intptr_t)failed;
}

/* the rows of a job shared out among threads, of which this one is the first */
static int split(const Job *whole, int threads) {
    const int64_t n = whole->matrix->n, parts = (n + ROWS - 1) / ROWS;
    if (threads > THREADS) threads = THREADS;
    if (threads > parts) threads = (int)parts;
    if (threads <= 1) return compute(whole);
    Job jobs[THREADS];
    pthread_t ids[THREADS];
    int failed = 0, started[THREADS];
    for (int i = threads - 1; i >= 0; i--) {
        jobs[i] = *whole;
        jobs[i].first = parts * i / threads * ROWS;
        jobs[i].last = i + 1 == threads ? n : parts * (i + 1) / threads * ROWS;
        started[i] = i > 0 && !pthread_create(&ids[i], NULL, thread, &jobs[i]);
        if (!started[i]) failed |= compute(&jobs[i]);
    }
    for (int i = 0; i < threads; i++) {
        void *result = NULL;
        if (started[i]) pthread_join(ids[i], &result);
        failed |= (int)(intptr_t)result;
    }
    return failed;
}

/* few tokens whose rows are not whole blocks get zeros behind them */
static int pad(Job *job, int64_t padded) {
    const int64_t k = job->matrix->k;
    uint16_t *copy = glm5_scratch(job->tokens * padded * 2, 2);
    if (!copy) return 1;
    for (int64_t t = 0; t < job->tokens; t++) {
        memcpy(copy + t * padded, job->x + t * job->stride, (size_t)k * 2);
        memset(copy + t * padded + k, 0, (size_t)(padded - k) * 2);
    }
    job->x = copy, job->stride = padded;
    return 0;
}

/* many tokens become panels, and so do the inputs of the shadow */
static int pack(Job *job, int64_t padded) {
    const Matrix *m = job->matrix;
    const int64_t tokens = (job->tokens + LANES - 1) / LANES * LANES, width = (m->count + 1) / 2 * 2;
    uint16_t *packed = glm5_scratch(tokens * padded * 2, 2), *shadow = glm5_scratch(tokens * (width + m->count) * 2, 3);
    if (!packed || !shadow) return 1;
    pack_panels(job->x, job->tokens, job->stride, m->k, padded, packed);
    if (m->count) {
        uint16_t *gathered = shadow + tokens * width;
        for (int64_t t = 0; t < job->tokens; t++)
            for (int64_t c = 0; c < m->count; c++)
                gathered[t * m->count + c] = job->x[t * job->stride + m->columns[c]];
        pack_panels(gathered, job->tokens, m->count, m->count, width, shadow);
    }
    job->x = packed, job->shadow_x = shadow;
    return 0;
}

/* out [T, N] (float32 or bf16) = x [T, K] (bf16, rows `stride` apart) times the matrix; 1 if memory is short */
int glm5_linear(const Matrix *m, const uint16_t *x, int64_t tokens, int64_t stride, void *out, int32_t out_kind,
                int32_t threads) {
    const int64_t padded = blocks_of(m) * GROUP, size = out_kind == F32 ? 4 : 2;
    for (int64_t first = 0, count; first < tokens; first += count) {
        count = tokens - first < TOKENS ? tokens - first : TOKENS;
        /* one to four tokens beyond whole registers are faster alone */
        if (count > LANES && count % LANES && count % LANES <= 4) count -= count % LANES;
        void *to = (char *)out + first * m->n * size;
        Job job = {m, x + first * stride, NULL, count, stride, 0, m->n, m->n, to, out_kind};
        if (count > FEW ? pack(&job, padded) : padded != m->k && pad(&job, padded)) return 1;
        if (split(&job, threads)) return 1;
    }
    return 0;
}

