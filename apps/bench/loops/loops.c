/* The loops as a C programmer writes them: one function each, rows one after the other, float32.
   What the compiler makes of them is the yardstick of the generated kernels. */
#include <math.h>

#define ROWS for (long r = 0; r < rows; r++)
#define COLUMNS for (long c = 0; c < n; c++)
#define VECTOR _Pragma("omp simd")
#define SUMMING(...) _Pragma(TEXT(omp simd reduction(+ : __VA_ARGS__)))
#define TEXT(x) #x

static float exponentials(const float *restrict x, float *restrict y, float *most, long n) {
    float high = x[0], total = 0;
    _Pragma("omp simd reduction(max : high)") COLUMNS high = fmaxf(high, x[c]);
    SUMMING(total) COLUMNS {
        y[c] = expf(x[c] - high);
        total += y[c];
    }
    *most = high;
    return total;
}

void softmax_forward(const float *restrict x, float *restrict y, long rows, long n) {
    ROWS {
        float *out = y + r * n, most;
        float factor = 1 / exponentials(x + r * n, out, &most, n);
        VECTOR COLUMNS out[c] *= factor;
    }
}

void softmax_backward(const float *restrict p, const float *restrict dp, float *restrict dx,
                      long rows, long n) {
    ROWS {
        const float *a = p + r * n, *b = dp + r * n;
        float *out = dx + r * n, inner = 0;
        SUMMING(inner) COLUMNS inner += a[c] * b[c];
        VECTOR COLUMNS out[c] = a[c] * (b[c] - inner);
    }
}

void cross_entropy(const float *restrict x, const int *restrict targets, float *restrict dx,
                   float *restrict loss, long rows, long n) {
    double sum = 0;
    ROWS {
        const float *in = x + r * n;
        float *out = dx + r * n, most;
        float total = exponentials(in, out, &most, n), factor = 1 / (total * rows);
        VECTOR COLUMNS out[c] *= factor;
        out[targets[r]] -= 1.0f / rows;
        sum += logf(total) + most - in[targets[r]];
    }
    *loss = sum / rows;
}

void norm_forward(const float *restrict x, const float *restrict scale,
                  const float *restrict shift, float *restrict y, float *restrict mean,
                  float *restrict inverse, long rows, long n, float epsilon) {
    ROWS {
        const float *in = x + r * n;
        float *out = y + r * n, sum = 0, squares = 0;
        SUMMING(sum) COLUMNS sum += in[c];
        float centre = sum / n;
        SUMMING(squares) COLUMNS squares += (in[c] - centre) * (in[c] - centre);
        float factor = 1 / sqrtf(squares / n + epsilon);
        VECTOR COLUMNS out[c] = (in[c] - centre) * factor * scale[c] + shift[c];
        mean[r] = centre;
        inverse[r] = factor;
    }
}

void norm_backward(const float *restrict x, const float *restrict scale,
                   const float *restrict mean, const float *restrict inverse,
                   const float *restrict dy, float *restrict dx, float *restrict dscale,
                   float *restrict dshift, long rows, long n) {
    VECTOR COLUMNS dscale[c] = dshift[c] = 0;
    ROWS {
        const float *in = x + r * n, *d = dy + r * n;
        float *out = dx + r * n, sum = 0, inner = 0, centre = mean[r], factor = inverse[r];
        SUMMING(sum, inner) COLUMNS {
            float z = (in[c] - centre) * factor, g = d[c] * scale[c];
            dscale[c] += d[c] * z;
            dshift[c] += d[c];
            sum += g;
            inner += g * z;
        }
        sum /= n;
        inner /= n;
        VECTOR COLUMNS {
            float z = (in[c] - centre) * factor;
            out[c] = factor * (d[c] * scale[c] - sum - z * inner);
        }
    }
}

void relu_forward(const float *restrict x, const float *restrict bias, float *restrict y,
                  long rows, long n) {
    ROWS VECTOR COLUMNS y[r * n + c] = fmaxf(x[r * n + c] + bias[c], 0);
}

void relu_backward(const float *restrict y, const float *restrict dy, float *restrict dx,
                   float *restrict dbias, long rows, long n) {
    VECTOR COLUMNS dbias[c] = 0;
    ROWS VECTOR COLUMNS {
        float d = y[r * n + c] > 0 ? dy[r * n + c] : 0;
        dx[r * n + c] = d;
        dbias[c] += d;
    }
}

void adam(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, long n,
          float rate, float correction, float beta1, float beta2, float epsilon) {
    VECTOR COLUMNS {
        m[c] = beta1 * m[c] + (1 - beta1) * g[c];
        v[c] = beta2 * v[c] + (1 - beta2) * g[c] * g[c];
        w[c] -= rate * m[c] / (sqrtf(correction * v[c]) + epsilon);
    }
}
