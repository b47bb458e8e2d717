/* Included once per dtype T: silu_mul_<T> and rotate_<T>, and each with its arguments in a struct. */

#define LOAD JOIN(load, T_NAME)
#define STORE JOIN(store, T_NAME)

static inline void JOIN(silu_mul_row, T_NAME)(T *restrict out, const T *restrict gate, const T *restrict up, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float a = LOAD(gate[i]);
        float silu = LOAD(STORE(a / (1.0f + fast_exp(-a))));
        out[i] = STORE(silu * LOAD(up[i]));
    }
}

/* out [rows, n], gate_up [rows, 2 n], both contiguous. */
void JOIN(silu_mul, T_NAME)(T *out, const T *gate_up, int64_t rows, int64_t n) {
#pragma omp parallel for if (rows > 1 && rows * n > SERIAL_SILU)
    for (int64_t row = 0; row < rows; row++)
        JOIN(silu_mul_row, T_NAME)(out + row * n, gate_up + 2 * row * n, gate_up + (2 * row + 1) * n, n);
}

static inline void JOIN(rotate_head, T_NAME)(
    T *restrict low, T *restrict high, const T *restrict cos, const T *restrict sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = LOAD(low[i]), b = LOAD(high[i]);
        low[i] = STORE(LOAD(STORE(a * LOAD(cos[i]))) + LOAD(STORE(b * LOAD(sin[i]))));
        high[i] = STORE(LOAD(STORE(b * LOAD(cos[half + i]))) + LOAD(STORE(a * LOAD(sin[half + i]))));
    }
}

/* x: tokens of num_heads heads, token_stride and head_stride elements apart; cos and sin: tokens of 2 * half elements,
 * angle_stride apart. */
void JOIN(rotate, T_NAME)(
    T *x, int64_t tokens, int64_t token_stride, int64_t num_heads, int64_t head_stride, const T *cos, const T *sin,
    int64_t angle_stride, int64_t half) {
#pragma omp parallel for if (tokens > 1 && tokens * num_heads * half > SERIAL_ROTATE)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            T *start = x + token * token_stride + head * head_stride;
            const int64_t angle = token * angle_stride;
            JOIN(rotate_head, T_NAME)(start, start + half, cos + angle, sin + angle, half);
        }
}

int JOIN(silu_mul_call, T_NAME)(const SiluCall *c) {
    JOIN(silu_mul, T_NAME)(c->out, c->gate_up, c->rows, c->n);
    return 0;
}

int JOIN(rotate_call, T_NAME)(const RotateCall *c) {
    JOIN(rotate, T_NAME)(c->x, c->tokens, c->token_stride, c->num_heads, c->head_stride, c->cos, c->sin,
                         c->angle_stride, c->half);
    return 0;
}

#undef LOAD
#undef STORE
