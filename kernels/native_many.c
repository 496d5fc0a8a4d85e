/* More than FEW tokens: blocks of rows are widened to bf16 (rounded once) into the cache, and a lane holds a token: 12
   rows by 32 tokens are summed in registers, in float32. */

#include "native.h"

float glm5_floats[16][16] ALIGNED;

__attribute__((constructor)) static void fill_floats(void) {
    for (int zero = 0; zero < 16; zero++)
        for (int code = 0; code < 16; code++) glm5_floats[zero][code] = (float)(code - zero);
}

void glm5_panels(const uint16_t *x, int64_t tokens, int64_t stride, int64_t k, int64_t width, uint16_t *out) {
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

INLINE void keep(Pair pair, uint16_t *out) {
    _mm512_store_si512(out, (__m512i)pair.low);
    _mm512_store_si512(out + 32, (__m512i)pair.high);
}

INLINE void widen_block(__m512i plane, float scale, uint8_t zero, uint16_t *out) {
    keep(looked_up(plane, scaled_table(scale, zero)), out);
}

static void widen_wide(const Matrix *m, int64_t first, int64_t rows, int64_t start, int64_t stop, uint16_t *out) {
    ALIGNED float scale[CHUNK / GROUP + LANES];
    for (int64_t row = first; row < first + rows; row++, out += STRIDE) {
        if (m->bits == 8) widen_scales(m, row * blocks_of(m) + start, stop - start, scale);
        for (int64_t b = start; b < stop; b++) {
            uint16_t *to = out + (b - start) * GROUP;
            if (m->bits == 8) keep(whole_numbers(m, 8, row, b, _mm512_set1_ps(scale[b - start])), to);
            else keep(whole_numbers(m, 16, row, b, _mm512_set1_ps(1)), to);
        }
    }
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

int glm5_many(const Job *job) {
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
            if (m->bits == 4) widen_rows(m, row, rows, b, stop, weights);
            else widen_wide(m, row, rows, b, stop, weights);
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
