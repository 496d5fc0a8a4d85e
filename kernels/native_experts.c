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

/* hidden [I] bf16 = silu(both[0..I]) * both[I..2I] */
static void gate(const float *both, int64_t width, uint16_t *hidden) {
    for (int64_t i = 0; i < width; i += LANES) {
        const __mmask16 mask = lanes(width - i);
        const __m512 value = _mm512_mul_ps(sigmoid_times(_mm512_maskz_loadu_ps(mask, both + i)),
                                           _mm512_maskz_loadu_ps(mask, both + width + i));
        _mm256_mask_storeu_epi16(hidden + i, mask, (__m256i)_mm512_cvtneps_pbh(value));
    }
}

static void add_scaled(float *out, const float *part, float weight, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] += weight * part[i];
}

/* out [T, D] float32 += weight * down(silu(gate x) * up x) for each of `pairs` (token, weight) of one expert */
static int expert(const Matrix *gate_up, const Matrix *down, const uint16_t *x, const int64_t *token,
                  const float *weight, int64_t pairs, float *out, int32_t threads) {
    const int64_t width = down->k, size = gate_up->k;
    uint16_t *rows = glm5_scratch(pairs * size * 2, 4), *hidden = glm5_scratch(pairs * width * 2, 5);
    float *both = glm5_scratch(pairs * (2 * width > size ? 2 * width : size) * 4, 6);
    if (!rows || !hidden || !both) return 1;
    for (int64_t p = 0; p < pairs; p++) memcpy(rows + p * size, x + token[p] * size, (size_t)size * 2);
    if (glm5_linear(gate_up, rows, pairs, size, both, F32, threads)) return 1;
    for (int64_t p = 0; p < pairs; p++) gate(both + p * 2 * width, width, hidden + p * width);
    if (glm5_linear(down, hidden, pairs, width, both, F32, threads)) return 1;
    for (int64_t p = 0; p < pairs; p++) add_scaled(out + token[p] * size, both + p * size, weight[p], size);
    return 0;
}

/* The routed layer: x [T, D] bf16, index and weight [T, A], out [T, D] bf16; index `experts` means no expert.
   Experts follow one another, each over its tokens in order. Returns 1 if memory is short, 2 for an index outside. */
int glm5_experts(const Matrix *gate_up, const Matrix *down, int64_t experts, const uint16_t *x, const int64_t *index,
                 const float *weight, int64_t tokens, int64_t choices, uint16_t *out, int32_t threads) {
    const int64_t pairs = tokens * choices, size = gate_up->k;
    int64_t *start = glm5_scratch((experts + 2 + pairs) * 8 + pairs * 4 + tokens * size * 4, 7);
    if (!start) return 1;
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
    for (int64_t e = 0; e < experts; e++) {
        const int64_t first = e ? start[e - 1] : 0, count = start[e] - first;
        if (count && expert(gate_up + e, down + e, x, token + first, factor + first, count, sum, threads)) return 1;
    }
    for (int64_t i = 0; i < tokens * size; i += LANES) {
        const __mmask16 mask = lanes(tokens * size - i);
        _mm256_mask_storeu_epi16(out + i, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, sum + i)));
    }
    return 0;
}
