/* Included once per dtype T of rows and dtype W of weights: rms_norm and add_rms_norm _<T>_<W>. */

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

/* out: contiguous [tokens, num_heads, size]; x: the same, tokens and heads so many elements apart. */
void NAME(rms_norm)(
    T *out, const T *x, int64_t tokens, int64_t token_stride, int64_t num_heads, int64_t head_stride, const W *weight,
    int64_t size, float eps) {
#pragma omp parallel for if (tokens > 1 && tokens * num_heads * size > SERIAL_NORM)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            const T *start = x + token * token_stride + head * head_stride;
            NAME(norm_row)(out + (token * num_heads + head) * size, start, weight, size, eps);
        }
}

static inline void NAME(add_row)(T *restrict residual, const T *restrict x, int64_t size) {
    for (int64_t i = 0; i < size; i++)
        residual[i] = STORE(LOAD(residual[i]) + LOAD(x[i]));
}

/* residual becomes the sum, x the normed sum; both are contiguous [rows, size]. */
void NAME(add_rms_norm)(T *x, T *residual, int64_t rows, const W *weight, int64_t size, float eps) {
#pragma omp parallel for if (rows > 1 && rows * size > SERIAL_NORM)
    for (int64_t row = 0; row < rows; row++) {
        NAME(add_row)(residual + row * size, x + row * size, size);
        NAME(norm_row)(x + row * size, residual + row * size, weight, size, eps);
    }
}

int NAME(rms_norm_call)(const NormCall *c) {
    NAME(rms_norm)(c->out, c->x, c->tokens, c->token_stride, c->num_heads, c->head_stride, c->weight, c->size,
                         c->eps);
    return 0;
}

int NAME(add_rms_norm_call)(const AddNormCall *c) {
    NAME(add_rms_norm)(c->x, c->residual, c->rows, c->weight, c->size, c->eps);
    return 0;
}

#undef NAME
#undef LOAD
#undef LOAD8
#undef LOAD_W
#undef STORE
