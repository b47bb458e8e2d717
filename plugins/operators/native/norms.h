/* Included once per dtype T of rows and dtype W of weights: rms_norm_call and add_rms_norm_call _<T>_<W>. */

#define NAME(name) JOIN(JOIN(name, T_NAME), W_NAME)
#define LOAD JOIN(load, T_NAME)
#define LOAD8 JOIN(LOAD8, T_NAME)
#define LOAD_W JOIN(load, W_NAME)
#define STORE JOIN(store, T_NAME)

static inline float NAME(sum_of_squares)(const T *x, int64_t size) {
    floats8 sums[4] = {{0}}, y;
    int64_t i = 0;
    for (; i + 32 <= size; i += 32)
        for (int k = 0; k < 4; k++) {
            LOAD8(x + i + 8 * k, y);
            sums[k] += y * y;
        }
    for (; i + 8 <= size; i += 8) {
        LOAD8(x + i, y);
        sums[0] += y * y;
    }
    floats8 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
    for (; i < size; i++)
        sum += LOAD(x[i]) * LOAD(x[i]);
    return sum;
}

static inline void NAME(norm_row)(T *restrict out, const T *restrict x, const W *restrict weight, int64_t size, float eps) {
    const float scale = 1.0f / sqrtf(NAME(sum_of_squares)(x, size) / (float)size + eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = STORE(LOAD(x[i]) * scale * LOAD_W(weight[i]));
}

static void NAME(rms_norm_turn)(const void *loop, int64_t turn, int32_t thread) {
    const NormCall *c = loop;
    (void)thread;
    ROWS_OF(turn, c->tokens, token)
        for (int64_t head = 0; head < c->num_heads; head++) {
            const T *start = (const T *)c->x + token * c->token_stride + head * c->head_stride;
            NAME(norm_row)((T *)c->out + (token * c->num_heads + head) * c->size, start, c->weight, c->size, c->eps);
        }
}

static inline void NAME(add_row)(T *restrict residual, const T *restrict x, int64_t size) {
    for (int64_t i = 0; i < size; i++)
        residual[i] = STORE(LOAD(residual[i]) + LOAD(x[i]));
}

static void NAME(add_rms_norm_turn)(const void *loop, int64_t turn, int32_t thread) {
    const AddNormCall *c = loop;
    T *x = c->x, *residual = c->residual;
    (void)thread;
    ROWS_OF(turn, c->rows, row) {
        NAME(add_row)(residual + row * c->size, x + row * c->size, c->size);
        NAME(norm_row)(x + row * c->size, residual + row * c->size, c->weight, c->size, c->eps);
    }
}

/* out: contiguous [tokens, num_heads, size]; x: the same, tokens and heads so many elements apart. */
int NAME(rms_norm_call)(const NormCall *c) {
    const int is_large = c->tokens * c->num_heads * c->size > SERIAL_NORM;
    dovetail_share(NAME(rms_norm_turn), c, TURNS(c->tokens), is_large ? c->threads : 1);
    return 0;
}

/* residual becomes the sum, x the normed sum; both are contiguous [rows, size]. */
int NAME(add_rms_norm_call)(const AddNormCall *c) {
    const int is_large = c->rows * c->size > SERIAL_NORM;
    dovetail_share(NAME(add_rms_norm_turn), c, TURNS(c->rows), is_large ? c->threads : 1);
    return 0;
}

#undef NAME
#undef LOAD
#undef LOAD8
#undef LOAD_W
#undef STORE
