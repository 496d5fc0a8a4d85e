/* Tokens rounded to 8 bits times 4-bit codes, by instructions that add four products of bytes to 32 bits.

   y = sum over blocks of scale(row, block) * scale(token, block) * sum (code - zero) * step: the inner sum is an exact
   integer, the outer one float32 in the order of the blocks. Steps and their scales are those of activation.py's
   "int8". A lane is a row: 16 rows of two blocks, transposed once for all tokens, have four inputs of a row in each
   lane, and four steps of a token are broadcast to meet them. The zero-point leaves through the sums of the steps. */

#include "native.h"

enum { STEPS = GROUP / 4, MOST = 12, PREPARED = 16, NEAR = 8 };

/* GCC keeps arrays of this type in registers; of __m512i, it stores every sum after every instruction */
typedef int32_t Sums __attribute__((vector_size(64)));

/* scales and zero-points of 16 rows, by block */
typedef struct {
    __m512 scale[PREPARED];
    __m512i zero[PREPARED];
} Grid;

static void round_block(const void *x, int64_t at, int64_t left, int kind, Piece *to, int half) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 value[GROUP / LANES];
    __m512i most = _mm512_setzero_si512(), sum = most;
    for (int i = 0; i < GROUP / LANES; i++) {
        value[i] = floats_at(x, at + i * LANES, kind, lanes(left - i * LANES));
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(value[i]), magnitude)); /* NaN is largest */
    }
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float scale;
    memcpy(&scale, &bits, 4);
    scale /= 127;
    if (scale < 0x1p-126f) scale = 0x1p-126f;
    for (int i = 0; i < GROUP / LANES; i++) {
        const __m512i step = _mm512_cvtps_epi32(_mm512_div_ps(value[i], _mm512_set1_ps(scale)));
        _mm_storeu_si128((__m128i *)(to->steps[half] + i * LANES), _mm512_cvtsepi32_epi8(step));
        sum = _mm512_add_epi32(sum, step);
    }
    to->less[half] = -_mm512_reduce_add_epi32(sum) & 0xffff;
    to->scale[half] = scale;
}

void glm5_round(const void *x, int kind, int64_t tokens, int64_t stride, int64_t k, Piece *out) {
    for (int64_t at = 0; at < k; at += 2 * GROUP)
        for (int64_t t = 0; t < tokens; t++, out++) {
            round_block(x, t * stride + at, k - at, kind, out, 0);
            round_block(x, t * stride + at + GROUP, k - at - GROUP, kind, out, 1);
        }
}

INLINE __m512i four(const int8_t *steps) {
    int32_t value;
    memcpy(&value, steps, 4);
    return _mm512_set1_epi32(value);
}

/* sums [count][16 rows] += 16 rows of two blocks times up to MOST tokens. High nibbles count 16 times as much. */
INLINE void tile(const uint8_t *codes, const Piece *x, const __m512i *zero, const __m512 *scale, int count,
                 float *sums) {
    const __m512i none = _mm512_setzero_si512(), mask = _mm512_set1_epi8(15);
    Sums low[MOST], high[MOST];
#pragma GCC unroll 12
    for (int t = 0; t < count; t++) {
        low[t] = (Sums)_mm512_dpwssd_epi32(none, zero[0], _mm512_set1_epi32(x[t].less[0]));
        high[t] = (Sums)_mm512_dpwssd_epi32(none, zero[1], _mm512_set1_epi32(x[t].less[1]));
    }
#pragma GCC unroll 1
    for (int j = 0; j < STEPS; j++) {
        const __m512i both = _mm512_load_si512(codes + j * 4 * LANES);
        const __m512i one = _mm512_and_si512(both, mask), two = _mm512_andnot_si512(mask, both);
#pragma GCC unroll 12
        for (int t = 0; t < count; t++) {
            low[t] = (Sums)_mm512_dpbusd_epi32((__m512i)low[t], one, four(x[t].steps[0] + 4 * j));
            high[t] = (Sums)_mm512_dpbusd_epi32((__m512i)high[t], two, four(x[t].steps[1] + 4 * j));
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < count; t++, sums += LANES) {
        const __m512 one = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)low[t]), _mm512_set1_ps(x[t].scale[0]));
        const __m512 two = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)high[t]), _mm512_set1_ps(x[t].scale[1]));
        const __m512 sum = _mm512_fmadd_ps(one, scale[0], _mm512_load_ps(sums));
        _mm512_store_ps(sums, _mm512_fmadd_ps(two, scale[1], sum));
    }
}

static __attribute__((noinline)) void tiles(const uint8_t *codes, const Piece *x, const __m512i *zero,
                                            const __m512 *scale, int64_t tokens, float *sums) {
    const int64_t parts = (tokens + MOST - 1) / MOST;
    for (int64_t i = 0, at = 0, next; i < parts; i++, at = next) {
        next = tokens * (i + 1) / parts;
        switch (next - at) {
#define CASE(count) case count: tile(codes, x + at, zero, scale, count, sums + at * LANES); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }
}

/* two blocks of 16 rows: [step][row][4 inputs] */
static void turn(const uint8_t *const *rows, int64_t at, uint8_t *out) {
    __m512i v[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) v[r] = _mm512_loadu_si512(rows[r] + at);
    transpose(v);
#pragma GCC unroll 16
    for (int j = 0; j < STEPS; j++) _mm512_store_si512(out + j * 4 * LANES, v[j]);
}

/* a sixteenth of the next rows; few tokens leave memory no time to reach the first cache */
INLINE void fetch(const uint8_t *next, int64_t tokens) {
    if (tokens < NEAR)
        for (int r = 0; r < LANES; r++) _mm_prefetch(next + r * GROUP, _MM_HINT_T1);
    else
        for (int r = 0; r < LANES; r++) _mm_prefetch(next + r * GROUP, _MM_HINT_T0);
}

/* up to PREPARED blocks from block b on; one that is not there has scale 0 */
static void prepare(const Matrix *m, const int64_t *row, int64_t b, Grid *to) {
    const int64_t blocks = blocks_of(m);
    const __mmask16 mask = lanes(blocks - b);
    __m512i scale[LANES], zero[LANES];
    for (int r = 0; r < LANES; r++) {
        const int64_t at = row[r] * blocks + b;
        scale[r] = _mm512_castps_si512(floats_at(m->scale, at, m->scale_kind, mask));
        zero[r] = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, m->zero + at));
    }
    transpose(scale);
    transpose(zero);
    for (int i = 0; i < PREPARED; i += 2) {
        to->scale[i] = _mm512_castsi512_ps(scale[i]);
        to->scale[i + 1] = _mm512_mul_ps(_mm512_castsi512_ps(scale[i + 1]), _mm512_set1_ps(1.0f / 16));
        to->zero[i] = zero[i];
        to->zero[i + 1] = _mm512_slli_epi32(zero[i + 1], 4);
    }
}

static void add_columns(const Job *job, int64_t row, __mmask16 mask, float *sums) {
    const Matrix *m = job->matrix;
    for (int64_t c = 0; c < m->count; c++) {
        const __m512 column = floats_at(m->residual, c * m->n + row, m->residual_kind, mask);
        for (int64_t t = 0; t < job->tokens; t++) {
            const __m512 value = _mm512_set1_ps(job->columns[c * job->tokens + t]);
            _mm512_store_ps(sums + t * LANES, _mm512_fmadd_ps(column, value, _mm512_load_ps(sums + t * LANES)));
        }
    }
}

void glm5_columns(const Matrix *m, const Piece *x, int64_t tokens, float *out) {
    for (int64_t c = 0; c < m->count; c++) {
        const int64_t at = m->columns[c], half = at / GROUP % 2;
        const float factor = m->residual_scale ? m->residual_scale[c] : 1;
        const Piece *piece = x + at / (2 * GROUP) * tokens;
        for (int64_t t = 0; t < tokens; t++, piece++)
            *out++ = factor * piece->scale[half] * (float)piece->steps[half][at % GROUP];
    }
}

int glm5_int8(const Job *job) {
    const Matrix *m = job->matrix;
    const int64_t blocks = blocks_of(m), bytes = bytes_of(m), tokens = job->tokens;
    ALIGNED uint8_t codes[STEPS * 4 * LANES];
    Grid grid;
    float *sums = glm5_scratch(tokens * LANES * 4, 0);
    if (!sums) return 1;
    for (int64_t row = job->first; row < job->last; row += LANES) {
        const int64_t count = job->last - row < LANES ? job->last - row : LANES;
        const uint8_t *rows[LANES], *next = m->codes + (row + LANES < m->n ? row + LANES : row) * bytes;
        int64_t number[LANES];
        for (int r = 0; r < LANES; r++) {
            number[r] = row + (r < count ? r : count - 1);
            rows[r] = m->codes + number[r] * bytes;
        }
        memset(sums, 0, (size_t)(tokens * LANES) * 4);
        for (int64_t b = 0; b < blocks; b += 2) {
            if (b % PREPARED == 0) prepare(m, number, b, &grid);
            fetch(next + b / 2 * GROUP * LANES, tokens);
            turn(rows, b / 2 * GROUP, codes);
            tiles(codes, job->pieces + b / 2 * tokens, grid.zero + b % PREPARED, grid.scale + b % PREPARED, tokens, sums);
        }
        add_columns(job, row, lanes(count), sums);
        for (int64_t t = 0; t < tokens; t++) store(job, t, row, sums + t * LANES, count);
    }
    return 0;
}
