/* A linear layer of 4-bit (or 8-bit, or bf16) weights on bf16 tokens: tokens made ready, rows shared out to threads. */

#include "native.h"

#include <pthread.h>
#include <stdlib.h>

static __thread void *kept[BUFFERS];
static __thread int64_t sizes[BUFFERS];
static pthread_key_t at_exit;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void glm5_trim(int64_t most) {
    for (int i = 0; i < BUFFERS; i++) {
        if (sizes[i] <= most) continue;
        free(kept[i]);
        kept[i] = NULL, sizes[i] = 0;
    }
}

static void leave(void *unused) {
    (void)unused;
    glm5_trim(0);
}

static void make_key(void) { pthread_key_create(&at_exit, leave); }

void *glm5_scratch(int64_t bytes, int which) {
    if (sizes[which] < bytes || !kept[which]) {
        pthread_once(&once, make_key);
        pthread_setspecific(at_exit, kept); /* a thread that ends takes its memory along */
        free(kept[which]);
        const int64_t whole = (bytes + 127) / 64 * 64;
        kept[which] = aligned_alloc(64, (size_t)whole);
        sizes[which] = kept[which] ? whole : 0;
    }
    return kept[which];
}

static int compute(const Job *job) {
    if (job->pieces) return glm5_int8(job);
    return job->tokens <= FEW ? glm5_few(job) : glm5_many(job);
}

static void *thread(void *argument) {
    const int failed = compute(argument);
    glm5_trim(0);
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
    glm5_panels(job->x, job->tokens, job->stride, m->k, padded, packed);
    if (m->count) {
        uint16_t *gathered = shadow + tokens * width;
        for (int64_t t = 0; t < job->tokens; t++)
            for (int64_t c = 0; c < m->count; c++)
                gathered[t * m->count + c] = job->x[t * job->stride + m->columns[c]];
        glm5_panels(gathered, job->tokens, m->count, m->count, width, shadow);
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
        /* one to eight tokens beyond whole registers are faster alone */
        if (count > LANES && count % LANES <= LANES / 2) count -= count % LANES;
        void *to = (char *)out + first * m->n * size;
        Job job = {.matrix = m, .x = x + first * stride, .tokens = count, .stride = stride, .last = m->n,
                   .out_stride = m->n, .out = to, .out_kind = out_kind};
        if (count > FEW ? pack(&job, padded) : padded != m->k && pad(&job, padded)) return 1;
        if (split(&job, threads)) return 1;
    }
    return 0;
}

int glm5_pieces(const Matrix *m, const Piece *x, int64_t tokens, void *out, int32_t out_kind, int32_t threads) {
    float *columns = glm5_scratch(m->count * tokens * 4, 3);
    if (!columns) return 1;
    glm5_columns(m, x, tokens, columns);
    const Job job = {.matrix = m, .pieces = x, .columns = columns, .tokens = tokens, .last = m->n,
                     .out_stride = m->n, .out = out, .out_kind = out_kind};
    return split(&job, threads);
}

/* the same from x [T, K] of any kind, rounded to 8 bits first */
int glm5_linear_int8(const Matrix *m, const void *x, int32_t kind, int64_t tokens, void *out, int32_t out_kind,
                     int32_t threads) {
    const int64_t size = out_kind == F32 ? 4 : 2, width = kind == F32 ? 4 : 2;
    for (int64_t first = 0, count; first < tokens; first += count) {
        count = tokens - first < TOKENS ? tokens - first : TOKENS;
        Piece *pieces = glm5_scratch(pairs_of(m) * count * (int64_t)sizeof(Piece), 2);
        if (!pieces) return 1;
        glm5_round((const char *)x + first * m->k * width, kind, count, m->k, m->k, pieces);
        if (glm5_pieces(m, pieces, count, (char *)out + first * m->n * size, out_kind, threads)) return 1;
    }
    return 0;
}
