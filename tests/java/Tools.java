import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Base64;
import org.apache.kafka.common.utils.Exit;

/** Runs command-line tools one after the other in one virtual machine: starting one takes longer than most tools. */
public final class Tools {
    private static final class Exited extends Error {
        private Exited() {
            super("exit");
        }
    }

    private static Integer status;

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        Exit.setExitProcedure(Tools::exit);
        Exit.setHaltProcedure(Tools::exit);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split("\t");
            ByteArrayOutputStream output = new ByteArrayOutputStream();
            PrintStream printed = new PrintStream(output, true, StandardCharsets.UTF_8);
            System.setOut(printed);
            System.setErr(printed);
            int code = run(words[0], Arrays.copyOfRange(words, 1, words.length), printed);
            answers.println(code + "\t" + Base64.getEncoder().encodeToString(output.toByteArray()));
            answers.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private static int run(String tool, String[] arguments, PrintStream printed) throws Exception {
        status = null;
        try {
            Class.forName(tool).getMethod("main", String[].class).invoke(null, (Object) arguments);
        } catch (InvocationTargetException failure) {
            if (!(failure.getCause() instanceof Exited)) {
                failure.getCause().printStackTrace(printed);
                return 1;
            }
        }
        return status == null ? 0 : status;
    }

    /** The first exit counts: a tool that catches everything exits again. */
    private static void exit(int code, String message) {
        if (status == null) {
            status = code;
        }
        throw new Exited();
    }
}
