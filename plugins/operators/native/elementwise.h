/* Included once per dtype T: silu_mul_call_<T> and rotate_call_<T>. */

#define LOAD JOIN(load, T_NAME)
#define STORE JOIN(store, T_NAME)

static inline void JOIN(silu_mul_row, T_NAME)(T *restrict out, const T *restrict gate, const T *restrict up, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float a = LOAD(gate[i]);
        float silu = LOAD(STORE(a / (1.0f + fast_exp(-a))));
        out[i] = STORE(silu * LOAD(up[i]));
    }
}

static void JOIN(silu_mul_turn, T_NAME)(const void *loop, int64_t turn, int32_t thread) {
    const SiluCall *c = loop;
    const T *gate_up = c->gate_up;
    const int64_t n = c->n;
    (void)thread;
    ROWS_OF(turn, c->rows, row)
        JOIN(silu_mul_row, T_NAME)((T *)c->out + row * n, gate_up + 2 * row * n, gate_up + (2 * row + 1) * n, n);
}

static inline void JOIN(rotate_head, T_NAME)(
    T *restrict low, T *restrict high, const T *restrict cos, const T *restrict sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = LOAD(low[i]), b = LOAD(high[i]);
        low[i] = STORE(LOAD(STORE(a * LOAD(cos[i]))) + LOAD(STORE(b * LOAD(sin[i]))));
        high[i] = STORE(LOAD(STORE(b * LOAD(cos[half + i]))) + LOAD(STORE(a * LOAD(sin[half + i]))));
    }
}

static void JOIN(rotate_turn, T_NAME)(const void *loop, int64_t turn, int32_t thread) {
    const RotateCall *c = loop;
    (void)thread;
    ROWS_OF(turn, c->tokens, token)
        for (int64_t head = 0; head < c->num_heads; head++) {
            T *start = (T *)c->x + token * c->token_stride + head * c->head_stride;
            const int64_t angle = token * c->angle_stride;
            JOIN(rotate_head, T_NAME)(start, start + c->half, (const T *)c->cos + angle, (const T *)c->sin + angle, c->half);
        }
}

/* out [rows, n], gate_up [rows, 2 n], both contiguous. */
int JOIN(silu_mul_call, T_NAME)(const SiluCall *c) {
    const int is_large = c->rows * c->n > SERIAL_SILU;
    dovetail_share(JOIN(silu_mul_turn, T_NAME), c, TURNS(c->rows), is_large ? c->threads : 1);
    return 0;
}

/* x: tokens of num_heads heads, token_stride and head_stride elements apart; cos and sin: tokens of 2 * half elements,
 * angle_stride apart. */
int JOIN(rotate_call, T_NAME)(const RotateCall *c) {
    const int is_large = c->tokens * c->num_heads * c->half > SERIAL_ROTATE;
    dovetail_share(JOIN(rotate_turn, T_NAME), c, TURNS(c->tokens), is_large ? c->threads : 1);
    return 0;
}

#undef LOAD
#undef STORE
