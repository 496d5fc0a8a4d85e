/* A layer of routed experts, one after another, each over its own tokens. */

#include "native.h"

INLINE __m512 sigmoid_times(__m512 x) {
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(t, whole);
    const float terms[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1};
    __m512 power = _mm512_set1_ps(terms[0]); /* 2 ** part, the first terms of its series */
    for (int i = 1; i < 7; i++) power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(terms[i]));
    power = _mm512_scalef_ps(power, whole);
    return _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1)));
}

/* hidden [I] float32 or bf16 = silu(both[0..I]) * both[I..2I] */
static void gate(const float *both, int64_t width, void *hidden, int kind) {
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 mask = lanes(width - i);
        const __m512 value = _mm512_mul_ps(sigmoid_times(_mm512_maskz_loadu_ps(mask, both + i)),
                                           _mm512_maskz_loadu_ps(mask, both + width + i));
        floats_to(hidden, i, kind, mask, value);
    }
}

static void add_scaled(float *out, const float *part, float weight, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] += weight * part[i];
}

/* a layer of experts and the tokens it is for, x [T, D] or rounded: pieces [pair][T] */
typedef struct {
    const Matrix *gate_up, *down;
    const uint16_t *x;
    const Piece *pieces;
    int64_t tokens;
    int32_t threads;
} Layer;

/* both [pairs, 2I] float32 = gate and up of some tokens, a chunk at a time */
static int above(const Layer *layer, int64_t e, const int64_t *token, int64_t pairs, float *both) {
    const Matrix *m = layer->gate_up + e;
    const int64_t size = m->k;
    if (!layer->pieces) {
        uint16_t *rows = glm5_scratch(pairs * size * 2, 4);
        if (!rows) return 1;
        for (int64_t p = 0; p < pairs; p++) memcpy(rows + p * size, layer->x + token[p] * size, (size_t)size * 2);
        return glm5_linear(m, rows, pairs, size, both, F32, layer->threads);
    }
    for (int64_t first = 0, count; first < pairs; first += count) {
        count = pairs - first < TOKENS ? pairs - first : TOKENS;
        Piece *mine = glm5_scratch(pairs_of(m) * count * (int64_t)sizeof(Piece), 4);
        if (!mine) return 1;
        for (int64_t i = 0; i < pairs_of(m); i++)
            for (int64_t p = 0; p < count; p++)
                mine[i * count + p] = layer->pieces[i * layer->tokens + token[first + p]];
        if (glm5_pieces(m, mine, count, both + first * m->n, F32, layer->threads)) return 1;
    }
    return 0;
}

/* out [T, D] float32 += weight * down(silu(gate x) * up x) for each of `pairs` (token, weight) of one expert */
static int expert(const Layer *layer, int64_t e, const int64_t *token, const float *weight, int64_t pairs, float *out) {
    const Matrix *down = layer->down + e;
    const int64_t width = down->k, size = down->n;
    const int int8 = layer->pieces != NULL, kind = int8 ? F32 : BF16;
    char *hidden = glm5_scratch(pairs * width * (int8 ? 4 : 2), 5);
    float *both = glm5_scratch(pairs * (2 * width > size ? 2 * width : size) * 4, 6);
    if (!hidden || !both || above(layer, e, token, pairs, both)) return 1;
    for (int64_t p = 0; p < pairs; p++) gate(both + p * 2 * width, width, hidden + p * width * (int8 ? 4 : 2), kind);
    const int failed = int8 ? glm5_linear_int8(down, hidden, F32, pairs, both, F32, layer->threads)
                            : glm5_linear(down, (uint16_t *)hidden, pairs, width, both, F32, layer->threads);
    if (failed) return 1;
    for (int64_t p = 0; p < pairs; p++) add_scaled(out + token[p] * size, both + p * size, weight[p], size);
    return 0;
}

static int routed(const Matrix *gate_up, const Matrix *down, int64_t experts, const void *x, int32_t kind, int32_t int8,
                  const int64_t *index, const float *weight, int64_t tokens, int64_t choices, void *out,
                  int32_t threads) {
    const int64_t pairs = tokens * choices, size = gate_up->k;
    int64_t *start = glm5_scratch((experts + 2 + pairs) * 8 + pairs * 4 + tokens * size * 4, 7);
    Piece *pieces = int8 ? glm5_scratch(pairs_of(gate_up) * tokens * (int64_t)sizeof(Piece), 8) : NULL;
    if (!start || (int8 && !pieces)) return 1;
    int64_t *token = start + experts + 2;
    float *factor = (float *)(token + pairs), *sum = factor + pairs;
    memset(start, 0, (size_t)(experts + 2) * 8);
    memset(sum, 0, (size_t)(tokens * size) * 4);
    for (int64_t i = 0; i < pairs; i++) {
        if (index[i] < 0 || index[i] > experts) return 2;
        start[index[i] + 1]++;
    }
    for (int64_t e = 0; e <= experts; e++) start[e + 1] += start[e];
    for (int64_t i = 0; i < pairs; i++) { /* start[e] moves on to where e + 1 starts */
        const int64_t at = start[index[i]]++;
        token[at] = i / choices, factor[at] = weight[i];
    }
    if (int8) glm5_round(x, kind, tokens, size, size, pieces);
    const Layer layer = {gate_up, down, x, pieces, tokens, threads};
    for (int64_t e = 0; e < experts; e++) {
        const int64_t first = e ? start[e - 1] : 0, count = start[e] - first;
        if (count && expert(&layer, e, token + first, factor + first, count, sum)) return 1;
    }
    for (int64_t i = 0; i < tokens * size; i += LANES) {
        const __mmask16 mask = lanes(tokens * size - i);
        floats_to(out, i, kind, mask, _mm512_maskz_loadu_ps(mask, sum + i));
    }
    return 0;
}

/* The routed layer: x [T, D] bf16 (of any kind if its tokens are to be rounded to 8 bits, int8), index and weight
   [T, A], out [T, D] of x's kind; index `experts` means no expert. Experts follow one another, each over its tokens in
   order. Returns 1 if memory is short, 2 for an index outside. */
int glm5_experts(const Matrix *gate_up, const Matrix *down, int64_t experts, const void *x, int32_t kind, int32_t int8,
                 const int64_t *index, const float *weight, int64_t tokens, int64_t choices, void *out,
                 int32_t threads) {
    const int failed = routed(gate_up, down, experts, x, kind, int8, index, weight, tokens, choices, out, threads);
    glm5_trim(KEPT);
    return failed;
}
