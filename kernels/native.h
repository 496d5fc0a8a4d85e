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
    FEW = 8,               /* tokens up to which rows are dotted along K */
    TILE = 12,             /* rows summed in registers, for 32 tokens */
    ROWS = 96, SHORT = 12, /* rows widened at once, and for up to 32 tokens */
    CHUNK = 512,           /* inputs widened at once */
    STRIDE = CHUNK + 32,   /* apart, so that rows do not share cache sets */
    TOKENS = 256,          /* tokens for which rows are widened once */
    AHEAD = 8,             /* rows that are prefetched */
    THREADS = 64,
    BUFFERS = 8
};
enum { BF16, F16, F32, I8 };

typedef struct {
    const uint8_t *codes, *zero;
    const void *scale;
    const int32_t *columns; /* shadow: input columns whose residual [count, N] is added */
    const void *residual;
    const float *residual_scale;
    int64_t n, k, count;
    int32_t scale_kind, residual_kind;
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

INLINE __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1); }

/* memory a thread keeps from call to call, by purpose (0 to 3 in a linear, 4 to 7 in experts); NULL if there is none */
void *glm5_scratch(int64_t bytes, int which);

int glm5_linear(const Matrix *m, const uint16_t *x, int64_t tokens, int64_t stride, void *out, int32_t out_kind,
                int32_t threads);

#endif
