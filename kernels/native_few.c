/* Up to FEW tokens: a dot along K for each row. Up to EXACT tokens meet the exact integers code - zero, and the scale
   of a block is applied to its float32 sums; more tokens meet weights rounded to bf16 once, which takes fewer
   instructions a token. */

#include "native.h"

static uint16_t INTEGERS[16][32] ALIGNED; /* bf16 of code - zero, by zero */

__attribute__((constructor)) static void fill_integers(void) {
    for (int zero = 0; zero < 16; zero++)
        for (int code = 0; code < 32; code++) INTEGERS[zero][code] = float_to_bf16((float)((code & 15) - zero));
}

/* rounded: the weights have their scale already */
INLINE void few_block(Pair pair, int rounded, float scale, const uint16_t *x, int64_t stride, int count, __m512 *sum) {
    const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 12
    for (int t = 0; t < count; t++) {
        const uint16_t *row = x + t * stride;
        __m512 dot = rounded ? sum[t] : _mm512_setzero_ps();
        dot = _mm512_dpbf16_ps(dot, pair.low, (__m512bh)_mm512_loadu_si512(row));
        dot = _mm512_dpbf16_ps(dot, pair.high, (__m512bh)_mm512_loadu_si512(row + 32));
        sum[t] = rounded ? dot : _mm512_fmadd_ps(dot, factor, sum[t]);
    }
}

/* a block of nibbles: looked up as integers, or with their scale */
INLINE void few_plane(__m512i plane, uint8_t zero, float scale, const uint16_t *x, int64_t stride, int count,
                      __m512 *sum) {
    const int rounded = count > EXACT;
    const __m512i table = rounded ? scaled_table(scale, zero) : _mm512_load_si512(INTEGERS[zero & 15]);
    few_block(looked_up(plane, table), rounded, scale, x, stride, count, sum);
}

/* two blocks of a row of 4-bit codes */
INLINE void few_nibbles(const Job *job, int64_t row, int ahead, int64_t b, const float *scale, int count, __m512 *sum) {
    const Matrix *m = job->matrix;
    const __m512i mask = _mm512_set1_epi8(15);
    const uint8_t *from = m->codes + row * bytes_of(m) + b * (GROUP / 2), *zero = m->zero + row * blocks_of(m) + b;
    const uint16_t *x = job->x + b * GROUP;
    const __m512i both = _mm512_loadu_si512(from);
    if (row + ahead < m->n) _mm_prefetch(from + ahead * bytes_of(m), _MM_HINT_T0);
    few_plane(_mm512_and_si512(both, mask), zero[0], scale[0], x, job->stride, count, sum);
    if (b + 1 == blocks_of(m)) return;
    const __m512i other = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    few_plane(other, zero[1], scale[1], x + GROUP, job->stride, count, sum);
}

/* two blocks of a row of 8-bit codes or bf16 weights */
INLINE void few_wide(const Job *job, int bits, int64_t row, int ahead, int64_t b, const float *scale, int count,
                     __m512 *sum) {
    const Matrix *m = job->matrix;
    const int rounded = bits == 16 || count > EXACT;
    for (int64_t at = b; at < b + 2 && at < blocks_of(m); at++) {
        if (row + ahead < m->n) {
            const uint8_t *next = m->codes + ((row + ahead) * m->k + at * GROUP) * (bits / 8);
            _mm_prefetch(next, _MM_HINT_T0);
            if (bits == 16) _mm_prefetch(next + 64, _MM_HINT_T0);
        }
        const float factor = bits == 16 ? 1 : scale[at - b];
        const Pair pair = whole_numbers(m, bits, row, at, _mm512_set1_ps(rounded ? factor : 1));
        few_block(pair, rounded, factor, job->x + at * GROUP, job->stride, count, sum);
    }
}

/* lane i: the sum of all lanes of v[i] */
INLINE __m512 sums_of(const __m512 v[16]) {
    __m512 pairs[8], fours[4], eights[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 a = v[2 * i], b = v[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        const __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        const __m512 high = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        fours[i] = _mm512_add_ps(low, high);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++) {
        const __m512 a = fours[2 * i], b = fours[2 * i + 1];
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                         _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

INLINE void few_rows(const Job *job, int bits, int64_t row, int rows, int count, const float *scale, float *out,
                     int64_t width) {
    const int64_t blocks = blocks_of(job->matrix);
    __m512 sum[2 * LANES];
    ALIGNED float sums[2 * LANES];
#pragma GCC unroll 32
    for (int i = 0; i < 2 * LANES; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b += 2) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const float *factor = scale + r * blocks + b;
            if (bits == 4) few_nibbles(job, row + r, rows, b, factor, count, sum + r * count);
            else few_wide(job, bits, row + r, rows, b, factor, count, sum + r * count);
        }
    }
    _mm512_store_ps(sums, sums_of(sum));
    if (rows * count > LANES) _mm512_store_ps(sums + LANES, sums_of(sum + LANES));
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 12
        for (int t = 0; t < count; t++) out[t * width + r] = sums[r * count + t];
}

/* four rows of up to four tokens, two rows of more, or a single row */
INLINE void few_any(const Job *job, int bits, int64_t row, int rows, const float *scale, float *out, int64_t width) {
    const int count = (int)job->tokens;
#define CASE(rows_, count_) \
    case count_: few_rows(job, bits, row, rows_, count_, scale, out, width); break;
#define UP_TO_FOUR(rows_) CASE(rows_, 1) CASE(rows_, 2) CASE(rows_, 3) CASE(rows_, 4)
#define MORE(rows_) CASE(rows_, 5) CASE(rows_, 6) CASE(rows_, 7) CASE(rows_, 8) CASE(rows_, 9) CASE(rows_, 10)
    if (rows == 4) switch (count) { UP_TO_FOUR(4) }
    else if (rows == 2) switch (count) { MORE(2) }
    else switch (count) { UP_TO_FOUR(1) MORE(1) }
#undef MORE
#undef UP_TO_FOUR
#undef CASE
}

static void few_four(const Job *job, int64_t row, int rows, const float *scale, float *out, int64_t width) {
    few_any(job, 4, row, rows, scale, out, width);
}

static void few_eight(const Job *job, int64_t row, int rows, const float *scale, float *out, int64_t width) {
    few_any(job, 8, row, rows, scale, out, width);
}

static void few_sixteen(const Job *job, int64_t row, int rows, const float *scale, float *out, int64_t width) {
    few_any(job, 16, row, rows, scale, out, width);
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

int glm5_few(const Job *job) {
    const Matrix *m = job->matrix;
    const int64_t width = job->last - job->first, blocks = blocks_of(m);
    const int most = job->tokens <= 4 ? 4 : 2;
    float *out = glm5_scratch(job->tokens * width * 4, 0), *scale = glm5_scratch((4 * blocks + LANES) * 4, 1);
    if (!out || !scale) return 1;
    for (int64_t row = job->first, rows; row < job->last; row += rows) {
        rows = job->last - row >= most ? most : 1;
        if (m->bits != 16) widen_scales(m, row * blocks, rows * blocks, scale);
        float *to = out + (row - job->first);
        if (m->bits == 4) few_four(job, row, (int)rows, scale, to, width);
        else if (m->bits == 8) few_eight(job, row, (int)rows, scale, to, width);
        else few_sixteen(job, row, (int)rows, scale, to, width);
    }
    for (int64_t t = 0; t < job->tokens; t++) {
        add_shadow(job, t, out + t * width);
        store(job, t, job->first, out + t * width, width);
    }
    return 0;
}
