/* Shared by the native kernels (native.py says when they are used): a packed matrix, and memory to work in.

   N out, K in, T tokens, B blocks of 64 along K. Codes are in "plane = group" order (layout.py): 64 bytes hold two
   blocks, one in the low nibbles and one in the high ones. */

#ifndef GLM5_NATIVE_H
#define GLM5_NATIVE_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

enum {
    GROUP = 64,            /* inputs with one scale */
    LANES = 16,            /* float32 numbers in a register */
    FEW = 10,              /* tokens up to which rows are dotted along K */
    EXACT = 2,             /* of these, up to which weights are not rounded */
    TILE = 12,             /* rows summed in registers, for 32 tokens */
    ROWS = 96, SHORT = 12, /* rows widened at once, and for up to 32 tokens */
    CHUNK = 512,           /* inputs widened at once */
    STRIDE = CHUNK + 32,   /* apart, so that rows do not share cache sets */
    TOKENS = 256,          /* tokens for which rows are widened once */
    AHEAD = 8,             /* rows that are prefetched */
    THREADS = 64,
    BUFFERS = 9,
    KEPT = 64 << 20        /* bytes of a buffer that a thread keeps after a layer of experts */
};
enum { BF16, F16, F32, I8 };

typedef struct {
    const uint8_t *codes, *zero;
    const void *scale;
    const int32_t *columns; /* shadow: input columns whose residual [count, N] is added */
    const void *residual;
    const float *residual_scale;
    int64_t n, k, count;
    int32_t scale_kind, residual_kind, bits; /* bits: 4; 8 (code - 128) and 16 (bf16): [N, K] as they are */
} Matrix;

INLINE float bf16_to_float(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE __mmask16 lanes(int64_t left) {
    if (left >= LANES) return 0xffff;
    return left > 0 ? (__mmask16)((1u << left) - 1) : 0;
}

/* two blocks of a token, rounded: value = step * scale; less: minus the sum of the steps, in 16 bits */
typedef struct {
    int8_t steps[2][GROUP];
    int32_t less[2];
    float scale[2];
} Piece;

/* some rows of a matrix times some tokens */
typedef struct {
    const Matrix *matrix;
    const uint16_t *x; /* few: rows of `stride` values; many: packed panels */
    const uint16_t *shadow_x;
    const Piece *pieces;  /* int8: [pair of blocks][token], instead of x */
    const float *columns; /* int8: inputs of the shadow, [count][token] */
    int64_t tokens, stride, first, last, out_stride;
    void *out;
    int32_t out_kind;
} Job;

INLINE float widen(const void *values, int64_t i, int kind) {
    if (kind == BF16) return bf16_to_float(((const uint16_t *)values)[i]);
    if (kind == F16) return _cvtsh_ss(((const uint16_t *)values)[i]);
    if (kind == F32) return ((const float *)values)[i];
    return (float)((const int8_t *)values)[i];
}

INLINE int64_t blocks_of(const Matrix *m) { return (m->k + GROUP - 1) / GROUP; }
INLINE int64_t pairs_of(const Matrix *m) { return (m->k + 2 * GROUP - 1) / (2 * GROUP); }
INLINE int64_t bytes_of(const Matrix *m) { return pairs_of(m) * GROUP; }

/* up to 16 values from position `at` on */
INLINE __m512 floats_at(const void *values, int64_t at, int kind, __mmask16 mask) {
    if (kind == F32) return _mm512_maskz_loadu_ps(mask, (const float *)values + at);
    if (kind == I8)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, (const int8_t *)values + at)));
    const __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)values + at);
    if (kind == F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* count float32 scales from position `at` on; a multiple of 16 is written */
INLINE void widen_scales(const Matrix *m, int64_t at, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i += LANES)
        _mm512_storeu_ps(out + i, floats_at(m->scale, at + i, m->scale_kind, lanes(count - i)));
}

typedef struct {
    __m512bh low, high; /* 64 weights of a row */
} Pair;

INLINE __m512bh words(__m256i bytes, __m512i table) {
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(bytes), table);
}

INLINE Pair looked_up(__m512i plane, __m512i table) {
    const Pair pair = {words(_mm512_castsi512_si256(plane), table), words(_mm512_extracti64x4_epi64(plane, 1), table)};
    return pair;
}

extern float glm5_floats[16][16]; /* code - zero, by zero */

/* bf16 of (code - zero) * scale, by code */
INLINE __m512i scaled_table(float scale, uint8_t zero) {
    const __m512 values = _mm512_mul_ps(_mm512_load_ps(glm5_floats[zero & 15]), _mm512_set1_ps(scale));
    return _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(values));
}

/* a block of 8-bit codes times scale, or of bf16 weights as they are; what is beyond K is zero */
INLINE Pair whole_numbers(const Matrix *m, int bits, int64_t row, int64_t block, __m512 scale) {
    const int64_t at = row * m->k + block * GROUP, left = m->k - block * GROUP;
    const __mmask64 mask = left >= GROUP ? ~0ull : (1ull << left) - 1;
    Pair pair;
    if (bits == 16) {
        const uint16_t *from = (const uint16_t *)m->codes + at;
        pair.low = (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)mask, from);
        pair.high = (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)(mask >> 32), from + 32);
        return pair;
    }
    const __m512i middle = _mm512_set1_epi8((char)128);
    const __m512i steps = _mm512_xor_si512(_mm512_mask_loadu_epi8(middle, mask, m->codes + at), middle);
#define QUARTER(i) _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(steps, i))), scale)
    pair.low = _mm512_cvtne2ps_pbh(QUARTER(1), QUARTER(0));
    pair.high = _mm512_cvtne2ps_pbh(QUARTER(3), QUARTER(2));
#undef QUARTER
    return pair;
}

/* up to 16 values to position `at` on, rounded once */
INLINE void floats_to(void *out, int64_t at, int kind, __mmask16 mask, __m512 values) {
    uint16_t *half = (uint16_t *)out + at;
    if (kind == F32) _mm512_mask_storeu_ps((float *)out + at, mask, values);
    else if (kind == F16) _mm256_mask_storeu_epi16(half, mask, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
    else _mm256_mask_storeu_epi16(half, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

INLINE void store(const Job *job, int64_t token, int64_t first, const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const __mmask16 mask = lanes(count - i);
        floats_to(job->out, token * job->out_stride + first + i, job->out_kind, mask,
                  _mm512_maskz_loadu_ps(mask, values + i));
    }
}

/* 16 x 16 numbers of 32 bits */
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

/* memory a thread keeps from call to call, by purpose (0 to 3 in a linear, 4 on in experts); NULL if there is none */
void *glm5_scratch(int64_t bytes, int which);
/* gives back the buffers of more bytes than that */
void glm5_trim(int64_t most);

/* rows job->first to job->last for up to FEW tokens (x: rows), for more (x: panels), or for rounded ones (pieces);
   1 if memory is short */
int glm5_few(const Job *job);
int glm5_many(const Job *job);
int glm5_int8(const Job *job);

/* tokens as panels of 16: [panel][width / 2][16 tokens][2]; what is missing is zero */
void glm5_panels(const uint16_t *x, int64_t tokens, int64_t stride, int64_t k, int64_t width, uint16_t *out);

/* tokens [T, K] of any kind, rounded; and what a shadow sees of them */
void glm5_round(const void *x, int kind, int64_t tokens, int64_t stride, int64_t k, Piece *out);
void glm5_columns(const Matrix *m, const Piece *x, int64_t tokens, float *out);

int glm5_linear(const Matrix *m, const uint16_t *x, int64_t tokens, int64_t stride, void *out, int32_t out_kind,
                int32_t threads);
int glm5_linear_int8(const Matrix *m, const void *x, int32_t kind, int64_t tokens, void *out, int32_t out_kind,
                     int32_t threads);
/* up to TOKENS tokens that are rounded already */
int glm5_pieces(const Matrix *m, const Piece *x, int64_t tokens, void *out, int32_t out_kind, int32_t threads);

#endif
